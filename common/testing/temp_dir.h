// A fresh directory of a test, which goes away with the object and all that was put there. Not for
// sharing between processes that may outlive it.
#pragma once

#include <filesystem>
#include <string>

namespace twinspark {

class TempDir {
 public:
  TempDir() : TempDir(std::filesystem::temp_directory_path()) {}
  explicit TempDir(const std::filesystem::path& parent);
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const {
    return std::filesystem::path(path_) / name;
  }

 private:
  std::string path_;
};

// A parent that lies in memory where there is one (writable), else the usual one: for tests that
// sync many MiB again and again.
std::filesystem::path InMemory();

}  // namespace twinspark
