// What the slots of k winners take all have in common: how their rule is given and their counts are told.
#pragma once
#include "modes/kwta.h"
#include "objects.h"

using Norms = std::optional<Array<const float, 1>>;

Rule rule_of(const std::string& pick, double amount, float temp, float guess = 0.f);
std::map<std::string, double> dict_of(const Winners& w);
