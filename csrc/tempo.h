// How fast the lines of matrices in memory are asked for. Too fast and CPUs drop what they are asked, too slow and
// memory waits; where the best lies depends on how many threads read and on where the host puts them, and changes
// within minutes. So it is found while matrices are read: now and then one is read a step faster or slower than the
// others.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels.h"

class Tempo {
 public:
  static constexpr int kFirst = 4;
  // Of a reading: the pace to ask at, and on which side of the usual one it lies.
  struct Try {
    int pace, side;  // side: -1, 0, 1
  };
  Try next();
  // What it took, in any unit of time a byte. kind: readings of one kind are compared with each other alone.
  void note(const Try& tried, size_t kind, double cost);
  int usual() const { return usual_; }

 private:
  static constexpr uint32_t kOneIn = 8, kOneInSettled = 32;  // readings, one tries another pace
  static constexpr size_t kTries = 16, kKinds = 8;
  static constexpr double kBetter = .98;  // of the usual cost: less is noise
  struct Side {
    double sum = 0;
    size_t count = 0;
    bool worse = false;  // the last time it was tried
  };
  struct Kind {
    size_t kind = 0;
    double cost = 0;  // at the usual pace, over some `count` readings
    size_t count = 0;
  };
  Kind& kind_of(size_t kind);
  int usual_ = kFirst;
  uint32_t random_ = 1;
  Side sides_[2];
  Kind kinds_[kKinds];
  size_t replaced_ = 0;
};

// While it lives a matrix is read, and the kernels ask at its pace.
class Reading {
 public:
  Reading(size_t kind, size_t bytes);
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  const size_t kind_, bytes_;
  Tempo::Try tried_;
  std::chrono::steady_clock::time_point start_;
};
