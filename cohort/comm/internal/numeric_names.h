#pragma once

/// How LibTorch prints addresses.
namespace cohort::comm {

/// Has LibTorch print addresses as numbers. Its store asks for the name of each address four times as it
/// opens, for texts that nobody reads, and where the name server does not answer each question takes 5 s.
/// Only calls from LibTorch are affected. Where its call is not found it resolves names as before. Opening a
/// store and making a group call this; the second is for stores that the user has opened.
void use_numeric_names();

}  // namespace cohort::comm
