"""Float rules of the Numba kernels, in one place for the formats' decoders and the operations above them."""

# reassociation lets LLVM vectorise sums; NaN and infinity keep their meaning (no "nnan", no "ninf")
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
