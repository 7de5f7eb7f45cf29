// A libcuda.so.1 that lacks what the driver needs.

int cuInit(unsigned flags) { return (int)flags; }
