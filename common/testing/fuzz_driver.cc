#include "common/testing/fuzz_driver.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/testing/seeded_rng.h"

namespace twinspark {
namespace {

constexpr double kSmokeSeconds = 20;
constexpr size_t kMaxInputBytes = size_t{1} << 20;

// The input under test lies in a shared mapping of a file, so that it survives an abort without a
// write per input.
class LastInput {
 public:
  explicit LastInput(const std::string& program) : path_(program + "-last-input.bin") {
    fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd_ < 0 || ftruncate(fd_, kMaxInputBytes) != 0) return;
    void* memory = mmap(nullptr, kMaxInputBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (memory != MAP_FAILED) memory_ = static_cast<char*>(memory);
  }
  ~LastInput() {
    if (memory_ != nullptr) munmap(memory_, kMaxInputBytes);
    if (fd_ >= 0) close(fd_);
    unlink(path_.c_str());
  }
  LastInput(const LastInput&) = delete;
  LastInput& operator=(const LastInput&) = delete;

  void Remember(const std::string& input) {
    if (memory_ == nullptr) return;
    const uint64_t size = input.size();
    std::memcpy(memory_, &size, sizeof(size));
    std::memcpy(memory_ + sizeof(size), input.data(),
                std::min(input.size(), kMaxInputBytes - sizeof(size)));
  }

 private:
  std::string path_;
  int fd_ = -1;
  char* memory_ = nullptr;
};

void MutateOnce(std::string& input, const std::vector<std::string>& corpus, SeededRng& rng) {
  static constexpr const char* kTokens[] = {
      "{",    "}",       "[",   "]", "\"", ":", ",", "-1", "0", "1e999", "18446744073709551616",
      "null", "\\u0000", "\xff"};
  const auto at = [&](size_t bound) {
    return bound == 0 ? size_t{0}
                      : static_cast<size_t>(rng.Int(0, static_cast<int64_t>(bound) - 1));
  };
  switch (rng.Int(0, 8)) {
    case 0:
      if (!input.empty()) input[at(input.size())] ^= static_cast<char>(1 << rng.Int(0, 7));
      break;
    case 1:
      if (!input.empty()) input[at(input.size())] = static_cast<char>(rng.Int(0, 255));
      break;
    case 2:
      input.resize(at(input.size() + 1));
      break;
    case 3:
      input.insert(at(input.size() + 1), kTokens[at(std::size(kTokens))]);
      break;
    case 4:
      input.erase(at(input.size() + 1), static_cast<size_t>(rng.Int(1, 16)));
      break;
    case 5: {
      const std::string& other = corpus[at(corpus.size())];
      const size_t from = at(other.size() + 1);
      input.insert(at(input.size() + 1), other.substr(from, static_cast<size_t>(rng.Int(1, 64))));
      break;
    }
    case 6: {  // a digit becomes another one: sizes and offsets that are almost right
      for (int tries = 0; tries < 32 && !input.empty(); ++tries) {
        char& c = input[at(input.size())];
        if (c >= '0' && c <= '9') {
          c = static_cast<char>('0' + rng.Int(0, 9));
          break;
        }
      }
      break;
    }
    case 7: {  // a block moves
      const size_t from = at(input.size() + 1);
      const std::string block = input.substr(from, static_cast<size_t>(rng.Int(1, 32)));
      input.insert(at(input.size() + 1), block);
      break;
    }
    default:  // the first eight bytes are lengths in several formats
      if (input.size() >= 8) input[at(8)] = static_cast<char>(rng.Int(0, 255));
      break;
  }
  if (input.size() > kMaxInputBytes / 2) input.resize(kMaxInputBytes / 2);
}

void RunOne(const std::string& input, LastInput& last) {
  last.Remember(input);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
}

// Inputs that broke this target before; none is the usual case.
std::vector<std::string> OldFindings(const std::string& program) {
  const std::filesystem::path dir =
      std::filesystem::path(TWINSPARK_SOURCE_DIR) / "tests/corpus" / program;
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const std::filesystem::path& path : paths)
    inputs.push_back(ReadAll(path));
  return inputs;
}

}  // namespace

void WriteSeeds(int argc, char** argv, const std::vector<std::string>& corpus) {
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-' || !std::filesystem::is_directory(argv[i])) continue;
    for (size_t seed = 0; seed < corpus.size(); ++seed) {
      const auto path = std::filesystem::path(argv[i]) / ("seed_" + std::to_string(seed));
      std::ofstream(path, std::ios::binary) << corpus[seed];
    }
    return;
  }
}

int FuzzMain(int argc, char** argv, const std::vector<std::string>& seeds) {
  double seconds = 60;
  uint64_t seed = 1;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--smoke") {
      seconds = kSmokeSeconds;
    } else if (flag == "--seconds" && i + 1 < argc) {
      seconds = std::atof(argv[++i]);
    } else if (flag == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (flag.starts_with("--")) {
      std::cerr << "usage: " << argv[0] << " [--smoke] [--seconds S] [--seed N] [file...]\n";
      return 78;
    } else {
      files.push_back(flag);
    }
  }
  const std::string program = std::string(argv[0]).substr(std::string(argv[0]).rfind('/') + 1);
  LastInput last(program);
  for (const std::string& file : files) {
    RunOne(ReadAll(file), last);
    std::cout << file << ": ok\n";
  }
  if (!files.empty()) return 0;
  std::vector<std::string> corpus = seeds;
  for (std::string& finding : OldFindings(program))
    corpus.push_back(std::move(finding));
  SeededRng rng(TestSeed(seed));
  for (const std::string& input : corpus)
    RunOne(input, last);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int64_t inputs = 0;
  while (std::chrono::steady_clock::now() < end) {
    std::string input =
        corpus[static_cast<size_t>(rng.Int(0, static_cast<int64_t>(corpus.size()) - 1))];
    for (int64_t n = rng.Int(1, 8); n > 0; --n)
      MutateOnce(input, corpus, rng);
    RunOne(input, last);
    ++inputs;
  }
  std::cout << program << ": " << inputs << " inputs, none broke an invariant\n";
  return 0;
}

}  // namespace twinspark
