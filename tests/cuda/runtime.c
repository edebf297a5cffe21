/* A stand-in for the CUDA libraries, in which onnxruntime's CUDA provider loads and runs without a GPU.

Memory is that of the host. Kernels compute nothing, so numbers and speed mean nothing; where a graph's
operators run, what is copied and which kernels are launched are decided by onnxruntime. build.py adds a
function that does nothing for each name that is missing here. The device is like an A100, SM 8.0. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROCESSORS = 108, SHARED_PER_BLOCK = 49152, SHARED_OPT_IN = 166912, KIND_TO_HOST = 2 };

static const size_t MEMORY = (size_t)80 << 30;

typedef struct { unsigned x, y, z; } Sizes;

/* Lines of the file that STAND_IN_LOG names: "kernel NAME" and "to host BYTES". */
static void note(const char *kind, const char *text) {
    static FILE *file;
    const char *path = getenv("STAND_IN_LOG");
    if (!path) return;
    if (!file && (file = fopen(path, "a"))) setvbuf(file, NULL, _IOLBF, 0);
    if (file) fprintf(file, "%s %s\n", kind, text);
}

/* Kernels: each one's function on the host, and its name. */

enum { SLOTS = 1 << 18 };
static struct { const void *function; const char *name; } kernels[SLOTS];

static unsigned slot_of(const void *function) {
    unsigned slot = ((uint64_t)function * 0x9e3779b97f4a7c15u) >> 46;
    while (kernels[slot].function && kernels[slot].function != function) slot = (slot + 1) % SLOTS;
    return slot;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFunction(void **binary, const void *function, char *stub, const char *name) {
    unsigned slot = slot_of(function);
    kernels[slot].function = function;
    kernels[slot].name = name;
}

/* Graphs compute sizes on the device and copy them to the host, where impossible ones stop a run. So three
   kinds of kernels do compute: those that fill an array of 32 bits from one element; those that cast integers
   of 64 bits to 32, with the arguments input, output, function, number of elements; and those of two integers
   of 64 or 32 bits (lll, iii), with the arguments left, right (scalars if their flag is 0), output, operator,
   number of elements. */
static void compute_sizes(const char *name, void **arguments) {
    const char *binary = strstr(name, "_BinaryElementWiseSimpleILb");
    if (strstr(name, "FillFromDataPtrKernelIi")) {
        int *out = *(void **)arguments[0], *value = *(void **)arguments[1];
        for (int i = 0; i < *(int *)arguments[2]; i++) out[i] = *value;
    }
    if (strstr(name, "_UnaryElementWiseIliNS0_7OP_Cast")) {
        int64_t *from = *(void **)arguments[0];
        int32_t *to = *(void **)arguments[1];
        for (int i = 0; i < *(int *)arguments[3]; i++) to[i] = (int32_t)from[i];
    }
    int whole_left, whole_right;
    char types[4], operator[4];
    const char *form = "%dELb%dE%3[li]NS0_%*dOP_%3s";
    if (!binary || sscanf(binary + 27, form, &whole_left, &whole_right, types, operator) != 4) return;
    int is_long = !strcmp(types, "lll");
    if (!is_long && strcmp(types, "iii")) return;
    int64_t *left = *(void **)arguments[0], *right = *(void **)arguments[1], *out = *(void **)arguments[2];
    int32_t *short_left = (void *)left, *short_right = (void *)right, *short_out = (void *)out;
    for (int i = 0; i < *(int *)arguments[4]; i++) {
        int64_t a = is_long ? left[whole_left * i] : short_left[whole_left * i];
        int64_t b = is_long ? right[whole_right * i] : short_right[whole_right * i];
        int64_t result;
        if (!strcmp(operator, "Add")) result = a + b;
        else if (!strcmp(operator, "Sub")) result = a - b;
        else if (!strcmp(operator, "Mul")) result = a * b;
        else if (!strcmp(operator, "Min")) result = a < b ? a : b;
        else if (!strcmp(operator, "Max")) result = a > b ? a : b;
        else return;
        if (is_long) out[i] = result;
        else short_out[i] = result;
    }
}

int cudaLaunchKernel(const void *function, Sizes grid, Sizes block, void **arguments) {
    const char *name = kernels[slot_of(function)].name;
    note("kernel", name ? name : "unknown");
    if (name) compute_sizes(name, arguments);
    return 0;
}

int __cudaLaunchKernel() __attribute__((alias("cudaLaunchKernel")));
int cudaLaunchCooperativeKernel() __attribute__((alias("cudaLaunchKernel")));

int cudaLaunchKernelExC(const void *config, const void *function, void **arguments) {
    return cudaLaunchKernel(function, (Sizes){1, 1, 1}, (Sizes){1, 1, 1}, arguments);
}

int __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, 0; }

int __cudaPopCallConfiguration(Sizes *grid, Sizes *block, size_t *shared, void **stream) {
    *grid = *block = (Sizes){1, 1, 1};
    *shared = 0;
    *stream = NULL;
    return 0;
}

int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return function(data), 0; }

int cudaFuncGetAttributes(void *attributes, const void *function) {
    /* Three sizes of memory; threads, registers, versions of PTX and code, cache mode, memory to opt in. */
    struct { size_t memory[3]; int values[6]; } known = {{0}, {1024, 64, 80, 80, 0, SHARED_OPT_IN}};
    memcpy(attributes, &known, sizeof known);
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count) { return *count = 1, 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count) { return *count = 1, 0; }

/* The device. */

int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaGetDevice(int *device) { return *device = 0; }
int cudaRuntimeGetVersion(int *version) { return *version = CUDA_MAJOR * 1000, 0; }
int cudaDriverGetVersion(int *version) { return *version = CUDA_MAJOR * 1000, 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = MEMORY, 0; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { return *status = 0; }
int cudaEventElapsedTime(float *milliseconds) { return *milliseconds = 1, 0; }
int cudaPointerGetAttributes(int *kind) { return kind[0] = 2, kind[1] = 0; }
size_t cudnnGetVersion(void) { return 91000; }

int cudaGetDeviceProperties(char *properties, int device) {
    /* struct cudaDeviceProp, as far as both versions have the same places; 13 dropped some fields of 12. */
    struct {
        char name[256], id[32];
        size_t memory, shared_per_block;
        int registers, warp;
        size_t pitch;
        int threads, block[3], grid[3], clock;
        size_t constant;
        int major, minor;
    } known = {"stand-in", "", MEMORY, SHARED_PER_BLOCK, 65536, 32, 0, 1024, {1024, 1024, 64},
               {2147483647, 65535, 65535}, 0, 65536, 8, 0};
    memset(properties, 0, CUDA_MAJOR < 13 ? 1032 : 1008);
    memcpy(properties, &known, sizeof known);
    *(int *)(properties + (CUDA_MAJOR < 13 ? 388 : 384)) = PROCESSORS;
    *(int *)(properties + (CUDA_MAJOR < 13 ? 624 : 604)) = 2048; /* threads of a multiprocessor */
    *(size_t *)(properties + (CUDA_MAJOR < 13 ? 696 : 672)) = SHARED_OPT_IN;
    return 0;
}

int cudaGetDeviceProperties_v2() __attribute__((alias("cudaGetDeviceProperties")));

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 16: *value = PROCESSORS; break;
    case 75: *value = 8; break; /* SM, major */
    case 76: case 115: *value = 0; break; /* SM, minor; pools of memory */
    case 97: *value = SHARED_OPT_IN; break;
    default: *value = 1024;
    }
    return 0;
}

/* Memory. */

int cudaMalloc(void **memory, size_t size) { return (*memory = calloc(1, size + 1)) ? 0 : 2; }
int cudaMallocAsync() __attribute__((alias("cudaMalloc")));
int cudaMallocHost() __attribute__((alias("cudaMalloc")));
int cudaHostAlloc() __attribute__((alias("cudaMalloc")));
int cudaFree(void *memory) { return free(memory), 0; }
int cudaFreeAsync(void *memory) { return free(memory), 0; }
int cudaFreeHost(void *memory) { return free(memory), 0; }
int cudaMemset(void *memory, int value, size_t size) { return memset(memory, value, size), 0; }
int cudaMemsetAsync(void *memory, int value, size_t size) { return memset(memory, value, size), 0; }

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    char text[32];
    snprintf(text, sizeof text, "host %zu", size);
    if (kind == KIND_TO_HOST) note("to", text);
    if (size) memcpy(to, from, size);
    return 0;
}

int cudaMemcpyAsync() __attribute__((alias("cudaMemcpy")));

int cudaMemcpy2DAsync(char *to, size_t to_row, const char *from, size_t from_row, size_t width, size_t rows) {
    for (size_t row = 0; row < rows; row++) memcpy(to + row * to_row, from + row * from_row, width);
    return 0;
}

/* Libraries. */

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *count) {
    memset(results, 0, 96);
    return *count = 1, 0;
}
