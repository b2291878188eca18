// A step to either side now and then, and to the better one: see tempo.h.
#include "tempo.h"

#include <algorithm>
#include <mutex>

int asking_pace = Tempo::kFirst;

Tempo::Try Tempo::next() {
  random_ = random_ * 1664525u + 1013904223u;
  const uint32_t drawn = random_ >> 16;
  const bool settled = sides_[0].worse && sides_[1].worse;
  const uint32_t one_in = settled ? kOneInSettled : kOneIn;
  if (drawn % one_in != 0) return {usual_, 0};
  const int side = drawn / one_in % 2 ? 1 : -1, pace = usual_ + side;
  return pace < kFastest || pace > kSlowest ? Try{usual_, 0} : Try{pace, side};
}

Tempo::Kind& Tempo::kind_of(size_t kind) {
  for (Kind& k : kinds_)
    if (k.kind == kind) return k;
  Kind& k = kinds_[replaced_++ % kKinds];
  k = {kind, 0, 0};
  return k;
}

void Tempo::note(const Try& tried, size_t kind, double cost) {
  if (tried.pace != usual_ + tried.side) return;  // the usual pace has changed meanwhile
  constexpr size_t kRemembered = 8;
  Kind& k = kind_of(kind);
  // A reading that the host interrupted says little.
  const double relative = k.count ? std::clamp(cost / k.cost, .7, 1.4) : 1;
  if (tried.side == 0) {
    if (!k.count) k.cost = cost;
    k.count = std::min(k.count + 1, kRemembered);
    k.cost *= 1 + (relative - 1) / static_cast<double>(k.count);
    return;
  }
  if (!k.count) return;
  Side& side = sides_[tried.side > 0];
  side.sum += relative;
  if (++side.count < kTries) return;
  const bool better = side.sum < kBetter * kTries;
  side = {0, 0, !better};
  if (!better) return;
  usual_ = tried.pace;
  sides_[0] = sides_[1] = {};
  for (Kind& other : kinds_) other.count = 0;
}

namespace {

std::mutex g_tempo_turn;  // texts on several Python threads read by turns, but they come here before that
Tempo g_tempo;

}  // namespace

Reading::Reading(size_t kind, size_t bytes) : kind_(kind), bytes_(bytes) {
  std::lock_guard<std::mutex> turn(g_tempo_turn);
  tried_ = g_tempo.next();
  asking_pace = tried_.pace;
  start_ = std::chrono::steady_clock::now();
}

Reading::~Reading() {
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start_;
  std::lock_guard<std::mutex> turn(g_tempo_turn);
  g_tempo.note(tried_, kind_, took.count() / static_cast<double>(bytes_));
  asking_pace = g_tempo.usual();
}
