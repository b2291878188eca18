// Levels from the clock: what a layer took at a level is learnt, and decides what the next may do.
#include "modes/pacer.h"

#include <algorithm>

namespace {

constexpr size_t kTurns = 13;  // tokens whose layers take turns at the levels: two layers try all 14 of event.py
constexpr double kRate = 0.05, kOthersRate = 0.04;  // how fast a new time replaces an old one; and moves other levels'
constexpr double kOdd = 2;  // times what was expected: the machine was busy elsewhere, which says nothing of a level
constexpr double kFastest = 0.8, kSlowest = 3, kSlowRate = 0.3;  // of a moment beside what is expected

}  // namespace

Pacer::Pacer(size_t levels, size_t layers, size_t still)
    : layers_(layers), still_(still), seconds_(levels, 0.), samples_(levels) {}

void Pacer::start(Way way) {
  way_ = way, expected_ = 0;
  used_.clear();
  start_ = layer_start_ = Clock::now();
}
void Pacer::begin(double seconds) {
  allowed_ = seconds;
  start(Way::timed);
}
void Pacer::replay(std::vector<uint8_t> levels) {
  known_ = std::move(levels);
  start(Way::replayed);
}

// The turns are over. A level that seems to take longer than the one before was unlucky; one that had no turn takes
// what its neighbour takes, until it is tried.
void Pacer::settle() {
  double before = 0;
  for (size_t level = 0; level < levels(); ++level) {
    std::vector<double>& seen = samples_[level];
    if (!seen.empty()) {
      std::nth_element(seen.begin(), seen.begin() + static_cast<long>(seen.size() / 2), seen.end());
      before = before == 0 ? seen[seen.size() / 2] : std::min(before, seen[seen.size() / 2]);
    }
    seconds_[level] = before;
    seen.clear();
  }
  for (size_t level = levels() - 1; level-- > 0;)
    if (seconds_[level] == 0) seconds_[level] = seconds_[level + 1];
}

double Pacer::end() {
  if (way_ == Way::timed && !used_.empty()) {
    slow_ += kSlowRate * (slow_now() - slow_);
    if (turns_ == kTurns) {
      const double tail = std::max(0., since(layer_start_) - seconds_[used_.back()]);
      if (tail_ == 0) tail_ = tail;
      tail_ += kRate * (std::min(tail, kOdd * tail_) - tail_);
    }
    if (turns_ < kTurns && ++turns_ == kTurns) settle();
  }
  way_ = Way::still;
  return since(start_);
}

// What the layer that is complete now took. The first token sets up what modes remember, and shows nothing else.
void Pacer::learn() {
  if (used_.empty() || turns_ == 0) return;
  const double took = since(layer_start_);
  if (turns_ < kTurns) {
    samples_[used_.back()].push_back(took);
    return;
  }
  double& known = seconds_[used_.back()];
  expected_ += known;
  const double ratio = std::min(took / known, kOdd) - 1;
  for (double& other : seconds_) other *= 1 + (&other == &known ? kRate : kOthersRate) * ratio;
}

// How much longer than expected the layers of this token have taken; before there are some, those of the last tokens.
double Pacer::slow_now() const {
  constexpr size_t kSome = 3;
  if (used_.size() < kSome || expected_ == 0) return slow_;
  const double done = std::chrono::duration<double>(layer_start_ - start_).count();
  return std::clamp(done / expected_, kFastest, kSlowest);
}

double Pacer::least() const { return static_cast<double>(layers_) * seconds_.back() + tail_; }

// The first level at which all layers that are left would be in time, but none below what the token began with: time
// that is left over is for what may still come.
size_t Pacer::decide(size_t layer) const {
  if (turns_ == 0) return levels() - 1;
  if (turns_ < kTurns) return (layer + turns_) % levels();
  const double left = (allowed_ - since(start_)) / slow_now() - tail_;
  size_t level = layer == 0 ? 0 : used_[0];
  while (level + 1 < levels() && seconds_[level] * static_cast<double>(layers_ - layer) > left) ++level;
  return level;
}

size_t Pacer::level(size_t layer) {
  if (way_ == Way::still) return still_;
  while (used_.size() <= layer) {
    const size_t next = used_.size();
    if (way_ == Way::timed) learn();
    layer_start_ = Clock::now();
    const size_t level = way_ == Way::timed ? decide(next) : next < known_.size() ? known_[next] : still_;
    used_.push_back(static_cast<uint8_t>(std::min(level, levels() - 1)));
  }
  return used_[layer];
}
