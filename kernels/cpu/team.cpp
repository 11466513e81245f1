// A team's life behind the C ABI; interpreter and sampler borrow it.

#include "team.h"

#include <exception>

using batonq::Team;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Null if that many threads can't be started.
EXPORT Team* batonq_team_create(int size) {
  try {
    return new Team(size);
  } catch (const std::exception&) {
    return nullptr;
  }
}

EXPORT void batonq_team_destroy(Team* self) { delete self; }
}
