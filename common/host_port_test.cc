// Goal: addresses are read and refused by name; a server is asked where it listens, in a form that
// a client takes. Method: literals.
#include "common/host_port.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark {
namespace {

TEST(HostPortTest, ParsesAndRefuses) {
  EXPECT_EQ(ParseHostPort("K", "h:1")->port, 1);
  EXPECT_EQ(ParseHostPort("K", "[::1]:2")->host, "::1");
  EXPECT_EQ(ParseHostPort("K", "[::1]:2")->ToString(), "[::1]:2");
  for (const char* bad : {"", "h", ":1", "h:", "h:65536", "h:-1", "h:x"}) {
    EXPECT_THAT(std::string(ParseHostPort("WORKERS", bad).status().message()),
                ::testing::HasSubstr("WORKERS='" + std::string(bad) + "'"));
  }
}

TEST(HostPortTest, AServerIsAskedWhereItListens) {
  EXPECT_EQ(LocalUrl({"", 8}), "http://127.0.0.1:8");
  EXPECT_EQ(LocalUrl({"0.0.0.0", 8}), "http://127.0.0.1:8");
  EXPECT_EQ(LocalUrl({"192.0.2.7", 8}), "http://192.0.2.7:8");
  EXPECT_EQ(LocalUrl({"::", 8}), "http://[::1]:8");
  EXPECT_EQ(LocalUrl({"2001:db8::7", 8}), "http://[2001:db8::7]:8");
}

}  // namespace
}  // namespace twinspark
