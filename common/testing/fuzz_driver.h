// Drives an LLVMFuzzerTestOneInput without libFuzzer, so that the fuzz targets run under any
// compiler and in the test run. With clang and -fsanitize=fuzzer (TWINSPARK_LIBFUZZER, preset
// `fuzz`, tests/fuzz.sh) libFuzzer brings its own main, and here only the seeds are written into
// its corpus folder.
//
//   x_fuzz.cc:  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { ... }
//               TWINSPARK_FUZZ_MAIN(Seeds())          // std::vector<std::string>: valid inputs to
//               start from
//
//   x_fuzz [--smoke] [--seconds S] [--seed N] [file...]   files are run as they are
//
// What once broke a target lies in tests/corpus/x_fuzz and is run first, every time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace twinspark {

// Mutates `corpus` (flips, inserts, deletes, splices, numbers and structure characters changed)
// until the time is over. Prints the seed, and every second's worth of inputs is remembered in
// fuzz-last-input.bin of the working folder until the run ends well, so that an abort leaves what
// caused it. Exit code 0, or the crash.
int FuzzMain(int argc, char** argv, const std::vector<std::string>& corpus);

// For libFuzzer, which takes its corpus from folders: writes `corpus` to the first argument that is
// a folder.
void WriteSeeds(int argc, char** argv, const std::vector<std::string>& corpus);

}  // namespace twinspark

#ifdef TWINSPARK_LIBFUZZER
#define TWINSPARK_FUZZ_MAIN(corpus)                              \
  extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) { \
    ::twinspark::WriteSeeds(*argc, *argv, corpus);               \
    return 0;                                                    \
  }
#else
#define TWINSPARK_FUZZ_MAIN(corpus)                   \
  int main(int argc, char** argv) {                   \
    return ::twinspark::FuzzMain(argc, argv, corpus); \
  }
#endif
