// Compiled with the include roots of gateway/scheduler by the tests include_allowed and include_forbidden.
#include "common/check.h"
#ifdef INCLUDE_A_KERNEL
#include "kernels/dtype.h"
#endif
