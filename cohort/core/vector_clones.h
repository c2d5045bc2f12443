#pragma once

/// `COHORT_VECTOR_CLONES void loop(...)` is compiled for several widths of vector, and the widest that the
/// machine has is chosen when the program is loaded, where compiler and system can do that; elsewhere it is
/// compiled once. What integers and single operations on floats give is the same for all; a product that is
/// added to something may be rounded once or twice, unless the file is compiled with -ffp-contract=off.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define COHORT_VECTOR_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define COHORT_VECTOR_CLONES
#endif
