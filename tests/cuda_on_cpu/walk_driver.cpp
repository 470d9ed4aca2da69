#include "pixels_driver.h"
#include "sm90_walk_launch.h"

UPCONV_PIXELS_DRIVER(walk)
