// The commit comes from the configure step (CMakeLists.txt of this folder).
#include "common/build_info.h"

namespace twinspark {

std::string BuildId() {
  return TWINSPARK_BUILD_ID;
}

}  // namespace twinspark
