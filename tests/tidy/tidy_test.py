#!/usr/bin/env python3
"""Each rule of tidy.py catches what it is for, and leaves good code alone."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tidy


class TidyTest(unittest.TestCase):
    def catches(self, check, path, text):
        self.assertTrue(list(check(path, text)), f"{path}: {text!r} passed")

    def passes(self, check, path, text):
        self.assertEqual(list(check(path, text)), [])

    def test_head(self):
        self.catches(tidy.check_head, "a/b.cc", "#include <x>\n")
        self.catches(tidy.check_head, "a/b.h", "// Head.\nint x;\n")
        self.passes(tidy.check_head, "a/b.h", "// Head.\n#pragma once\n")
        self.catches(tidy.check_head, "a/b.sh", "#!/bin/sh\nls\n")

    def test_words(self):
        self.catches(tidy.check_words, "a/b.cc", "// TO" + "DO: later")
        self.catches(tidy.check_words, "a/b.md", "see .." + "/shared/spec")
        self.passes(tidy.check_words, "a/b.cc", "// a method")

    def test_includes(self):
        self.catches(tidy.check_includes, "gateway/text/x.cc", '#include "kernels/dtype.h"')
        self.catches(tidy.check_includes, "gateway/scheduler/x.cc", '#include "gateway/http/y.h"')
        self.catches(tidy.check_includes, "kernels/norm/x.cc", '#include "../../gateway/y.h"')
        self.catches(tidy.check_includes, "kernels/norm/x.cc", "#include <grpcpp/grpcpp.h>")
        self.catches(tidy.check_includes, "gateway/text/x.cc", "#include <boost/beast.hpp>")
        self.passes(tidy.check_includes, "gateway/openai/x.cc", '#include "gateway/text/y.h"\n#include <vector>')
        self.passes(tidy.check_includes, "kernels/norm/x_test.cc", '#include "common/testing/seeded_rng.h"\n#include <gtest/gtest.h>')

    def test_function_length(self):
        body = "  x();\n" * 71
        self.assertEqual([f[2] for f in tidy.functions("void F(int a,\n       int b) {\n" + body + "}\n")], [74])
        self.assertEqual([f[0] for f in tidy.functions("int A::F() const {\n  if (x) {\n  }\n}\n")], ["A::F"])

    def test_links(self):
        self.catches(tidy.check_links, "README.md", "[x](no/such/file.md)")
        self.passes(tidy.check_links, "README.md", "[x](LICENSE) [y](https://example.org)")

    def test_co_await(self):
        self.catches(tidy.check_co_await, "a.cc", "co_await f([p] { g(p); });")
        self.passes(tidy.check_co_await, "a.cc", "co_await f(std::move(named));")


if __name__ == "__main__":
    unittest.main()
