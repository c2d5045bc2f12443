#pragma once

namespace cohort::test {

/// What a child of elastic tests does: run_mlp(), by its environment: TEST_STEPS, TEST_HIDDEN,
/// TEST_BUCKET_BYTES, TEST_CHUNK_BYTES, TEST_THREADS, TEST_FOLDER, and TEST_POINT, "hello:2": there it asks
/// by TEST_CONTROL_FD whether it may continue. Returns its status.
int run_mlp_child();

}  // namespace cohort::test
