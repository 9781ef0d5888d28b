// Stands in for TileLang's dcache_bypass.h: caches are not modelled, so the bypass is a plain checked access.
#pragma once
#include "kvsim/pointers.h"

namespace tl {
template <class T> T read_gm_bypass_dcache(kvsim::gm_ptr<T> address) { return *address; }
template <class T, class V> void write_gm_bypass_dcache(kvsim::gm_ptr<T> address, V value) { *address = T(value); }
} // namespace tl
