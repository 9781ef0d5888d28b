// TileLang's templates include this name; everything behind it comes from tl_templates/ascend/common.h.
#pragma once
