// Speed of encoding in MB/s on one core: mixed text (English, code, Chinese), once with every piece
// new and once with the cache warm, and long pieces of three lengths.
//   tokenizer_bench [--smoke] [tokenizer.json]   (default: the demo model's)
#include "gateway/text/tokenizer.h"

#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>

#include "common/check.h"

namespace {

using twinspark::gateway::Tokenizer;

// Deterministic words of a large vocabulary, so that many pieces are new.
std::string MixedText(size_t num_bytes) {
  uint64_t state = 20261201;
  const auto next = [&] { return state = state * 6364136223846793005u + 1442695040888963407u; };
  std::string text;
  while (text.size() < num_bytes) {
    switch (next() >> 60) {
      case 0:
        text += "\n    if (value_" + std::to_string(next() >> 50) + " != nullptr) {\n";
        break;
      case 1:
        text += "这是一个用来测量速度的句子，";
        break;
      default:
        for (uint64_t n = 2 + (next() >> 61); n > 0; --n) {
          constexpr const char* kSyllables[] = {"ta", "ri", "on", "ing", "mo", "ble", "st", "er"};
          text += kSyllables[next() >> 61];
        }
        text += ' ';
    }
  }
  return text;
}

// Processor time, so that other work on the machine does not count.
double CpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void Measure(const Tokenizer& tokenizer, const char* name, const std::string& text) {
  std::vector<int32_t> ids;
  ids.reserve(text.size());
  const double start = CpuSeconds();
  tokenizer.EncodePlain(text, &ids);
  const double seconds = CpuSeconds() - start;
  std::printf("%-24s %8.1f kB %9zu tokens %8.2f MB/s\n", name,
              static_cast<double>(text.size()) / 1e3, ids.size(),
              static_cast<double>(text.size()) / 1e6 / seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const bool smoke = argc > 1 && std::strcmp(argv[1], "--smoke") == 0;
  const std::string path = argc > (smoke ? 2 : 1) ? argv[smoke ? 2 : 1]
                                                  : TWINSPARK_SOURCE_DIR
                               "/deploy/demo_model/tokenizer.json";
  const auto tokenizer = Tokenizer::Load(path);
  CHECK(tokenizer.ok()) << tokenizer.status();
  const size_t num_bytes = smoke ? 20000 : 8000000;
  const std::string text = MixedText(num_bytes);
  Measure(**tokenizer, "mixed text, first time", text);
  Measure(**tokenizer, "mixed text, again", text);
  // Pieces that the split rules do not cut: time per byte must not grow with their length.
  for (const size_t share : {64, 8, 1}) {
    const size_t n = num_bytes / share;
    Measure(**tokenizer, "one piece of letters", std::string(n / 2, 'a') + std::string(n / 2, 'b'));
    Measure(**tokenizer, "one piece of spaces", std::string(n, ' '));
    std::string mixed;
    for (uint64_t state = 1; mixed.size() < n;) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      mixed.push_back(static_cast<char>('a' + (state >> 60)));
    }
    Measure(**tokenizer, "one piece of any letters", mixed);
  }
  return 0;
}
