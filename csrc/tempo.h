// How fast lines are asked for that come from memory, or may. Too fast and CPUs drop what they are asked, too slow and
// memory waits; where the best lies depends on how many threads read and on where the host puts them, and changes
// within minutes. So it is found while matrices are read: now and then one is read a step faster or slower than the
// others. Where a cache holds them the fastest pace is the best.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels.h"

class Tempo {
 public:
  explicit Tempo(int first) : usual_(first) {}
  // Of a reading: the pace to ask at, and on which side of the usual one it lies.
  struct Try {
    int pace, side;  // side: -1, 0, 1
  };
  Try next();
  // What it took, in any unit of time a byte. place: readings of one place are compared with each other alone.
  void note(const Try& tried, size_t place, double cost);
  int usual() const { return usual_; }

 private:
  static constexpr uint32_t kOneIn = 8, kOneInSettled = 32;  // readings, one tries another pace
  static constexpr size_t kTries = 16, kPlaces = 256;
  static constexpr double kBetter = .98;  // of the usual cost: less is noise
  struct Side {
    double sum = 0;
    size_t count = 0;
    bool worse = false;  // the last time it was tried
  };
  struct Place {
    size_t place = 0;
    double cost = 0;  // at the usual pace, over some `count` readings
    size_t count = 0;
  };
  int usual_;
  uint32_t random_ = 1;
  Side sides_[2];
  Place places_[kPlaces];
};

// While it lives a matrix is read, and the kernels ask at its pace.
class Reading {
 public:
  // some: by a list, which is another place than all of it.
  Reading(const Mat& w, bool some);
  void done(size_t bytes);  // that have been read
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  const size_t size_, place_;
  Tempo::Try tried_;
  std::chrono::steady_clock::time_point start_;
};
