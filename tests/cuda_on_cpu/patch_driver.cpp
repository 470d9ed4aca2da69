#include "pixels_driver.h"
#include "sm90_patch_launch.h"

UPCONV_PIXELS_DRIVER(patch)
