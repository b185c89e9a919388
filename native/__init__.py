"""Native code (C++20, nanobind). The pure-Python path works without it."""
