// A step to either side now and then, and to the better one: see tempo.h.
#include "tempo.h"

#include <algorithm>
#include <mutex>

namespace {

// Of medium matrices and of large ones: many of the former lie in a cache.
constexpr int kFirst[2] = {kFastest, 4};
constexpr size_t kEnough = kMaybeMemory / 4;     // bytes, for a clock to tell how fast they came
constexpr uint64_t kMixed = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio: addresses are multiples of much

}  // namespace

int asking_paces[3] = {kFastest, kFirst[0], kFirst[1]};

Tempo::Try Tempo::next() {
  random_ = random_ * 1664525u + 1013904223u;
  const uint32_t drawn = random_ >> 16;
  const bool settled = (sides_[0].worse || usual_ == kFastest) && (sides_[1].worse || usual_ == kSlowest);
  const uint32_t one_in = settled ? kOneInSettled : kOneIn;
  if (drawn % one_in != 0) return {usual_, 0};
  const int side = drawn / one_in % 2 ? 1 : -1, pace = usual_ + side;
  return pace < kFastest || pace > kSlowest ? Try{usual_, 0} : Try{pace, side};
}

void Tempo::note(const Try& tried, size_t place, double cost) {
  if (tried.pace != usual_ + tried.side) return;  // the usual pace has changed meanwhile
  constexpr size_t kRemembered = 8;
  Place& p = places_[place % kPlaces];
  if (p.place != place) p = {place, 0, 0};
  // A reading that the host interrupted says little.
  const double relative = p.count ? std::clamp(cost / p.cost, .7, 1.4) : 1;
  if (tried.side == 0) {
    if (!p.count) p.cost = cost;
    p.count = std::min(p.count + 1, kRemembered);
    p.cost *= 1 + (relative - 1) / static_cast<double>(p.count);
    return;
  }
  if (!p.count) return;
  Side& side = sides_[tried.side > 0];
  side.sum += relative;
  if (++side.count < kTries) return;
  const bool better = side.sum < kBetter * kTries;
  side = {0, 0, !better};
  if (!better) return;
  usual_ = tried.pace;
  sides_[0] = sides_[1] = {};
  for (Place& other : places_) other.count = 0;
}

namespace {

std::mutex g_tempo_turn;  // texts on several Python threads read by turns, but they come here before that
Tempo g_tempos[2] = {Tempo(kFirst[0]), Tempo(kFirst[1])};

}  // namespace

Reading::Reading(const Mat& w, bool some)
    : size_(static_cast<size_t>(size_of(w))), place_((reinterpret_cast<size_t>(w.data) * kMixed >> 32) * 2 + some) {
  std::lock_guard<std::mutex> turn(g_tempo_turn);
  tried_ = g_tempos[size_ - 1].next();
  asking_paces[size_] = tried_.pace;
  start_ = std::chrono::steady_clock::now();
}

void Reading::done(size_t bytes) {
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start_;
  std::lock_guard<std::mutex> turn(g_tempo_turn);
  Tempo& tempo = g_tempos[size_ - 1];
  if (bytes >= kEnough) tempo.note(tried_, place_, took.count() / static_cast<double>(bytes));
  asking_paces[size_] = tempo.usual();
}
