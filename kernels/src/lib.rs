//! Fast paths of dsq, one folder per operation: scalar reference beside AVX2 (detected at run time).

pub mod conv;
