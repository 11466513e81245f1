// How the rows of a batch are divided among the members of a team: alike, or by how fast each has been of late.
//
// A core is slower than its neighbour while it is shared, throttled or taken away. Members that wait for each other only
// now and then each get the rows that they will do in the same time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace batonq {

struct Share {
  int64_t begin, end;
};

class Division {
 public:
  explicit Division(int members) : members_(members) {
    for (Member& member : members_) member.speed = alike();
  }

  // Divides `count` rows from now on.
  void begin(int64_t count, bool by_speed) {
    count_ = count, by_speed_ = by_speed;
    divide();
  }

  Share rows(int rank) const {
    const bool last = rank + 1 == static_cast<int>(members_.size());
    return {members_[rank].begin, last ? count_ : members_[rank + 1].begin};
  }

  // A member has done its rows, and it took so long.
  void note(int rank, double seconds) { members_[rank].seconds = seconds; }

  // Divides anew by what was noted since the last time. Nobody else may look meanwhile.
  void learn() {
    double all = 0.0;
    for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
      const Share own = rows(rank);
      if (members_[rank].seconds == 0.0 || own.begin == own.end) return forget();
      all += static_cast<double>(own.end - own.begin) / members_[rank].seconds;
    }
    double sum = 0.0;
    for (int rank = 0; rank < static_cast<int>(members_.size()); ++rank) {
      Member& member = members_[rank];
      const Share own = rows(rank);
      const double now = static_cast<double>(own.end - own.begin) / member.seconds / all;
      // A core that was away for a moment is back the next.
      member.speed += kStep * (std::clamp(now, member.speed / kMost, member.speed * kMost) - member.speed);
      member.speed = std::max(member.speed, kLeast * alike());
      sum += member.speed;
    }
    for (Member& member : members_) member.speed /= sum;
    forget();
    divide();
  }

 private:
  struct alignas(64) Member {
    double speed;  // all together: 1
    double seconds = 0.0;
    int64_t begin = 0;
  };
  static constexpr double kStep = 0.4, kMost = 1.5;
  // Who does nothing would never be seen to be fast again.
  static constexpr double kLeast = 0.125;

  double alike() const { return 1.0 / static_cast<double>(members_.size()); }

  void forget() {
    for (Member& member : members_) member.seconds = 0.0;
  }

  void divide() {
    double before = 0.0;
    for (Member& member : members_) {
      member.begin = static_cast<int64_t>(before * static_cast<double>(count_) + 0.5);
      before += by_speed_ ? member.speed : alike();
    }
  }

  std::vector<Member> members_;
  int64_t count_ = 0;
  bool by_speed_ = false;
};

}  // namespace batonq
