// What tests call to run the weight's gradient of patches.
#include "pixels_wgrad_driver.h"
#include "sm90_wgrad_patch_launch.h"

UPCONV_PIXELS_WGRAD_DRIVER(patch_wgrad)
