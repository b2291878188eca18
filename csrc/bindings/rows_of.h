// Rows of neurons as Python gives them, every size checked.
#pragma once
#include "objects.h"

using Bytes = Array<const uint8_t, 2>;
NeuronRows rows_of(const std::string& quant, size_t d, size_t f, const Bytes& data, const ConstScales& scales);
// The same where there may be none.
using OptionalBytes = std::optional<Bytes>;
NeuronRows maybe_rows(const std::string& quant, size_t d, size_t f, const OptionalBytes& data,
                      const ConstScales& scales);
