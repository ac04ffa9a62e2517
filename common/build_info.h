// What this build is: commit and compile options, for Hello, --version, /status and the handshake
// between processes.
#pragma once

#include <string>

namespace twinspark {

// "COMMIT[-dirty] BUILD_TYPE[ SANITIZER]"; "unknown" for the commit outside a git checkout.
std::string BuildId();

}  // namespace twinspark
