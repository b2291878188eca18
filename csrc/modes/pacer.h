// How much each layer of a token may spend: levels go from all of the work (0) to the least.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

// A layer's level is decided when its first place asks, from the time that is left and from what layers took so far at
// each level; in the first tokens layers take turns at all levels, to learn that. The levels of a token are logged;
// replaying them gives the same result whatever the clock says.
class Pacer {
 public:
  Pacer(size_t levels, size_t layers, size_t still);  // still: the level without a budget
  void begin(double seconds);                         // a token starts, whose layers may take so long
  void replay(std::vector<uint8_t> levels);           // or: whose levels are known
  double end();                                       // seconds that its layers took
  size_t level(size_t layer);
  const std::vector<uint8_t>& used() const { return used_; }       // by layer, of the last token
  const std::vector<double>& seconds() const { return seconds_; }  // of a layer, by level; 0: not known yet
  double least() const;                                            // seconds that a token takes at the last level
  size_t levels() const { return seconds_.size(); }
  size_t layers() const { return layers_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Way { still, timed, replayed };
  size_t layers_, still_;
  std::vector<double> seconds_;
  size_t turns_ = 0;                          // tokens whose layers took turns
  std::vector<std::vector<double>> samples_;  // of those, by level
  Way way_ = Way::still;
  std::vector<uint8_t> used_, known_;
  Clock::time_point start_, layer_start_;
  double allowed_ = 0;
  double expected_ = 0;  // of the layers of this token that are done
  double slow_ = 1;      // how much longer than expected layers take at the moment
  double tail_ = 0;      // seconds from the last layer to the end of a token
  double since(Clock::time_point t) const { return std::chrono::duration<double>(Clock::now() - t).count(); }
  void start(Way way);
  void settle();
  void learn();
  double slow_now() const;
  size_t decide(size_t layer) const;
};
