// What tests call to run the weight's gradient of all phases of a row.
#include "pixels_wgrad_driver.h"
#include "sm90_wgrad_phases_launch.h"

UPCONV_PIXELS_WGRAD_DRIVER(phases_wgrad)
