// Checks of the C++ tests: they print what failed and where, and end the program with status 1.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                             \
    }                                                                           \
  } while (false)

#define CHECK_NEAR(got, want, tolerance)                                                  \
  do {                                                                                    \
    const double got_ = (got), want_ = (want), tolerance_ = (tolerance);                  \
    if (!(std::fabs(got_ - want_) <= tolerance_)) {                                       \
      std::fprintf(stderr, "%s:%d: %s is %.9g, expected %.9g within %.3g\n", __FILE__,    \
                   __LINE__, #got, got_, want_, tolerance_);                              \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (false)

#define CHECK_THROWS(expression)                                                              \
  do {                                                                                        \
    bool threw_ = false;                                                                      \
    try {                                                                                     \
      (void)(expression);                                                                     \
    } catch (const std::exception&) {                                                         \
      threw_ = true;                                                                          \
    }                                                                                         \
    if (!threw_) {                                                                            \
      std::fprintf(stderr, "%s:%d: %s did not throw\n", __FILE__, __LINE__, #expression);     \
      std::exit(1);                                                                           \
    }                                                                                         \
  } while (false)
