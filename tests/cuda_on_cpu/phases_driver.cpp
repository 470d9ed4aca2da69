#include "pixels_driver.h"
#include "sm90_phases_launch.h"

UPCONV_PIXELS_DRIVER(phases)
