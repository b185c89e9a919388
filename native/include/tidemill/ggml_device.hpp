#pragma once

#include <string>
#include <vector>

#include "tidemill/attention.hpp"

namespace tidemill {

/// Make `attend` known to ggml as a device that computes attention and nothing else. Contexts that are made from now on
/// give it their attention where keys and values are halves in the processor's own memory, and the rest to ggml's own
/// code. Once in a process; returns why it cannot be, or nothing.
std::string offer_attention();

/// What the streams of the context that computes next have in common; by stream.
void share(std::vector<Beginning> beginnings);

}  // namespace tidemill
