// Shared library with one variant of fused_adam.cu, compiled for the CPU. The variant is selected
// by the same macros as on a GPU.
#include "cuda_on_host.h"

#include "fused_adam.cu"

// Runs the kernel `name` to completion. Returns 1, or 0 if the variant has no such kernel.
extern "C" int run(const char* name, unsigned blocks, unsigned threads, void** arguments) {
#define INFINITY_RUN(kernel)                                  \
  if (std::strcmp(name, #kernel) == 0) {                      \
    emulated::run_kernel(kernel, blocks, threads, arguments); \
    return 1;                                                 \
  }
#ifdef INFINITY_RULE
  INFINITY_RUN(update_small)
  INFINITY_RUN(update_large)
#else
  INFINITY_RUN(square_tiles_Fp32)
  INFINITY_RUN(square_tiles_Bf16)
  INFINITY_RUN(square_tiles_Fp16)
  INFINITY_RUN(fold_partials)
#endif
  return 0;
}
