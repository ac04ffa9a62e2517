// Goal: a server is asked where it listens, in a form that a client takes. Method: literals.
#include "common/host_port.h"

#include <gtest/gtest.h>

namespace twinspark {
namespace {

TEST(HostPortTest, AServerIsAskedWhereItListens) {
  EXPECT_EQ(LocalUrl({"", 8}), "http://127.0.0.1:8");
  EXPECT_EQ(LocalUrl({"0.0.0.0", 8}), "http://127.0.0.1:8");
  EXPECT_EQ(LocalUrl({"192.0.2.7", 8}), "http://192.0.2.7:8");
  EXPECT_EQ(LocalUrl({"::", 8}), "http://[::1]:8");
  EXPECT_EQ(LocalUrl({"2001:db8::7", 8}), "http://[2001:db8::7]:8");
}

}  // namespace
}  // namespace twinspark
