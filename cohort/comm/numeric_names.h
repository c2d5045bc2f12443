#pragma once

/// Addresses as LibTorch's text of them.
namespace cohort::comm {

/// Has LibTorch write addresses as numbers. Its store asks for the name of each address four times as it
/// opens, for texts that nobody reads, and where the name server does not answer each question takes 5 s.
/// Only what LibTorch asks is answered so; others of this process get names as before. Call it before a store
/// is opened; the first call has the effect.
void use_numeric_names();

}  // namespace cohort::comm
