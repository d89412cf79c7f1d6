// What the kernels take from CUDA, for a host compiler: conversions of 16-bit floats, and a constant.

static float widened(Bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static Bf16 rounded_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        return {0x7fff};
    }
    return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

static float widened(F16 x) {
    int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
    float sign = x.bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) {
        return fraction ? NAN : sign * INFINITY;
    }
    // Below the normal numbers there is no hidden bit.
    return sign * (exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24));
}

static F16 rounded_to_f16(float value) {
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) {
        return {0x7fff};
    }
    float size = fabsf(value);
    if (size >= 65520.0f) {
        return {(uint16_t)(sign | 0x7c00)};
    }
    // In units of the last place, which rint rounds to, half to even; a carry goes into the exponent as it should.
    int exponent;
    frexpf(size, &exponent);
    int place = size == 0 || exponent - 11 < -24 ? -24 : exponent - 11;
    uint32_t units = (uint32_t)rintf(ldexpf(size, -place));
    return {(uint16_t)(sign | (units + ((uint32_t)(place + 24) << 10)))};
}

static float minus_infinity() {
    return -INFINITY;
}
