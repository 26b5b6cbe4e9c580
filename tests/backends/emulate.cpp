// Runs the kernels of transpose.cu on the processor, as they are written: one fiber for each CUDA
// thread, one thread block after the other. A fiber runs until __syncthreads() or its end; a block
// goes on when all its fibers got there. Fibers run in order or, `backwards`, in reverse, so that a
// missing barrier shows. An access outside of the arrays (tests put them next to pages that may not
// be touched) or at a wrong alignment makes launch() return the signal's number.

#include <csetjmp>
#include <csignal>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <vector>

struct Dim3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}

// PTX's prmt: each nibble of `selector` picks one of the eight bytes of (high, low).
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector)
{
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int n = 0; n < 4; ++n)
        result |= (unsigned)(bytes >> (selector >> 4 * n & 7) * 8 & 0xff) << 8 * n;
    return result;
}

static Dim3 threadIdx, blockIdx;
static void __syncthreads();

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#include SOURCE

namespace {

const size_t STACK_BYTES = 32 << 10;

struct Fiber {
    jmp_buf at;  // where it goes on: a jump makes no system call, as swapcontext() does
    std::unique_ptr<char[]> stack;
    Dim3 thread;
    bool done;
};

jmp_buf scheduler;
std::vector<Fiber> fibers;
Fiber *running;
void (*kernel)(const Work);
Work work;
sigjmp_buf escape;

void leave()
{
    if (!_setjmp(running->at))
        _longjmp(scheduler, 1);
}

void run_threads()
{
    for (;;) {
        kernel(work);
        running->done = true;
        leave();
    }
}

void resume(Fiber &fiber)
{
    running = &fiber;
    threadIdx = fiber.thread;
    if (_setjmp(scheduler))
        return;
    if (fiber.stack)
        _longjmp(fiber.at, 1);
    fiber.stack.reset(new char[STACK_BYTES]);
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = fiber.stack.get();
    first.uc_stack.ss_size = STACK_BYTES;
    makecontext(&first, run_threads, 0);
    setcontext(&first);
}

void run_block(unsigned x, unsigned y, bool backwards)
{
    const unsigned count = x * y;
    if (fibers.size() < count)
        fibers.resize(count);
    for (unsigned n = 0; n < count; ++n) {
        fibers[n].thread = {n % x, n / x, 0};
        fibers[n].done = false;
    }
    for (bool left = true; left;) {
        left = false;
        for (unsigned n = 0; n < count; ++n) {
            Fiber &fiber = fibers[backwards ? count - 1 - n : n];
            if (!fiber.done) {
                resume(fiber);
                left |= !fiber.done;
            }
        }
    }
}

void on_signal(int number)
{
    siglongjmp(escape, number);
}

#define ENTRY(NAME, BYTES) {"permute_" #NAME "_" #BYTES, permute_##NAME##_##BYTES}
#define ENTRIES_OF(BYTES)                                                                          \
    ENTRY(vector, BYTES), ENTRY(tile, BYTES), ENTRY(copy, BYTES), ENTRY(cells, BYTES)

const struct {
    const char *name;
    void (*kernel)(const Work);
} entries[] = {ENTRIES_OF(1), ENTRIES_OF(2), ENTRIES_OF(4), ENTRIES_OF(8), ENTRIES_OF(16)};

}  // namespace

static void __syncthreads()
{
    leave();
}

// Returns 0, the number of the signal that stopped it, or -1 for an unknown name.
extern "C" int launch(
    const char *name, unsigned grid, unsigned x, unsigned y, const void *packed, int backwards)
{
    kernel = nullptr;
    for (const auto &entry : entries)
        if (!std::strcmp(entry.name, name))
            kernel = entry.kernel;
    if (!kernel)
        return -1;
    std::memcpy(&work, packed, sizeof work);

    struct sigaction action = {}, before[3];
    const int signals[3] = {SIGSEGV, SIGBUS, SIGILL};
    action.sa_handler = on_signal;
    action.sa_flags = SA_NODEFER;
    for (int n = 0; n < 3; ++n)
        sigaction(signals[n], &action, &before[n]);
    const int failure = sigsetjmp(escape, 1);
    if (!failure)
        for (unsigned block = 0; block < grid; ++block) {
            blockIdx = {backwards ? grid - 1 - block : block, 0, 0};
            run_block(x, y, backwards);
        }
    else
        fibers.clear();  // they are somewhere in a kernel
    for (int n = 0; n < 3; ++n)
        sigaction(signals[n], &before[n], nullptr);
    return failure;
}

extern "C" unsigned long long work_bytes()
{
    return sizeof(Work);
}
