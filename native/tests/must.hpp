#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends the test program when a condition does not hold.
#define MUST(condition)                                                                    \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

/// Ends the test program when a statement does not throw the error.
#define MUST_THROW(error, statement)                                                       \
  do {                                                                                     \
    bool threw = false;                                                                    \
    try {                                                                                  \
      statement;                                                                           \
    } catch (const error&) {                                                               \
      threw = true;                                                                        \
    }                                                                                      \
    MUST(threw);                                                                           \
  } while (false)
