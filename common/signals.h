// SIGTERM and SIGINT as something that main() waits for, instead of handlers.
#pragma once

namespace twinspark {

// Call first in main(), before any thread starts: blocks SIGTERM and SIGINT in every thread,
// ignores SIGPIPE.
void BlockStopSignals();

// Waits for SIGTERM or SIGINT and returns its number.
int WaitForStopSignal();

// From now on a second stop signal ends the process at once with 130.
void ExitOnNextStopSignal();

}  // namespace twinspark
