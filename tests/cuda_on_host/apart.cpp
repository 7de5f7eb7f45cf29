// take_apart() and unpack() of k8x_mma.h for a test.
#include "ptx.h"

#include "../../csrc/include/k8x_mma.h"

// For `count` zero points: rest[i], and q - near as unpacking gives it, in units of 1. `odd`: of row 1 and positions 1
// and 3, else of row 0 and positions 0 and 2.
extern "C" void apart(const u16 *z, int count, int odd, float *rest, float (*q_less_near)[16]) {
    for (int i = 0; i < count; ++i) {
        MinusBase minus[2];
        u32 rests;
        take_apart(z[i] * 0x10001u, minus, rests);
        rest[i] = to_float(rests >> 16 * odd);
        for (u32 q = 0; q < 16; ++q) {
            u32 pair[4];
            unpack(q * 0x11111111, minus[odd], pair);
            q_less_near[i][q] = WEIGHT_UNIT * to_float(odd ? pair[1] >> 16 : pair[0]);
        }
    }
}
