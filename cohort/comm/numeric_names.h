#pragma once

/// How LibTorch prints addresses.
namespace cohort::comm {

/// Has LibTorch print addresses as numbers. Its store asks for the name of each address four times as it
/// opens, for texts that nobody reads, and where the name server does not answer each question takes 5 s.
/// Only calls from LibTorch are affected. Call it before a store is opened; later calls do nothing.
/// Returns false where LibTorch's call was not found: then it resolves names as before.
bool use_numeric_names();

}  // namespace cohort::comm
