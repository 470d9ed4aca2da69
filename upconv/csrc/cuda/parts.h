// Which gradients a library holds: the one that is built first leaves the weight's out
// (-DUPCONV_WGRAD=0), the other has little else (-DUPCONV_WGRAD=1). Tests have both.
#pragma once

#if !defined(UPCONV_WGRAD)
#define UPCONV_WITH_IGRAD 1
#define UPCONV_WITH_WGRAD 1
#elif UPCONV_WGRAD
#define UPCONV_WITH_IGRAD 0
#define UPCONV_WITH_WGRAD 1
#else
#define UPCONV_WITH_IGRAD 1
#define UPCONV_WITH_WGRAD 0
#endif
