// Any bytes as JSON: an error with a reason, or a value whose rendering reads back as the same
// value and renders the same again.
#include "gateway/text/ordered_json.h"

#include <string_view>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"

namespace {

std::vector<std::string> Seeds() {
  return {R"({"b":[1,2.50,"x",null,true,false],"a":{"c":{}},"b":3})",
          R"([-0,1e400,12345678901234567890123,"\ud83d\ude00\u0001\/é",1E-7,[[[]]]])",
          R"({"":"\"\\\b\f\n\r\t","\u00e9":-0.0})"};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using twinspark::gateway::Json;
  const auto value = Json::Parse(std::string_view(reinterpret_cast<const char*>(data), size), 32);
  if (!value.ok()) {
    CHECK(!value.status().message().empty());
    return 0;
  }
  const std::string text = value->Dump();
  const auto again = Json::Parse(text, 32);
  CHECK(again.ok()) << again.status() << " " << text;
  CHECK(*again == *value) << text;
  CHECK(again->Dump() == text) << text;
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
