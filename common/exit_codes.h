// Stable exit codes of every program. Source: operations specification 5.4, protocol
// specification 9.
#pragma once

namespace twinspark {

enum ExitCode : int {
  kExitOk = 0,
  kExitMismatch = 64,      // build, protocol, config or weights digests differ between processes
  kExitBadData = 65,       // wrong or damaged model, tokenizer, token map or row table
  kExitUnavailable = 69,   // a rank or a row service that never came
  kExitHang = 70,          // stopped by its runner after a hang
  kExitDevice = 71,        // device error
  kExitNoMemory = 75,      // not enough memory: need, have and the setting to change are in the log
  kExitBadConfig = 78,     // a bad setting, or a port that is taken
  kExitInterrupted = 130,  // the starter went away, or a second stop signal
};

}  // namespace twinspark
