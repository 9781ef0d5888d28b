// Stands in for TileLang's common.h: the simulated device, then those of TileLang's own templates that run unchanged.
#pragma once
#include "kvsim/core.h"
#include "kvsim/entry.h"
#include "kvsim/math.h"
#include "kvsim/simt.h"
#include "kvsim/types.h"
#include "kvsim/ubsan.h"

// Qualifiers. The translator has already turned qualified pointers of the generated source into checked ones; these
// remain for the code of TileLang's templates.
#define __gm__
#define __ubuf__
#define __simt_vf__ static
#define __simt_callee__ inline
#define __SIMT_DEVICE_FUNCTIONS_DECL__
#define __aicore__
#define __global__
#define __vector__
#define __launch_bounds__(threads)
#define __NPU_ARCH__ 3510

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;

#include "tl_templates/ascend/ascend_fp8.h"
#if KVSIM_REDUCE
#include <type_traits>

#include "tl_templates/ascend/reduce.h"
#endif
