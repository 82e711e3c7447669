// Runs one call of a kernel on the host: reads it from the standard input, and writes what the kernel has made of its output
// to the standard output. All numbers are of four bytes.
//
//     name length, name (padded to whole numbers), grid x y z, threads, shared floats,
//     buffers, then of each how many numbers and these; the first is the output,
//     scalars, then these

#include "device.h"

// What the threads of a block share, as the kernels name it.
float shared[32 << 10];

#include "../attention.cu"
#include "../cache.cu"
#include "../finish.cu"
#include "../norm.cu"
#include "../pool.cu"
#include "../rotary.cu"

#include <string>
#include <sys/mman.h>
#include <tuple>
#include <unistd.h>

static const size_t SHARED_FLOATS = sizeof(shared) / sizeof(float);

// Where memory has not been written, and must not be read: not a number, and one of its kind.
static const unsigned UNTOUCHED = 0x7fedcba9u;

static unsigned read_number() {
    unsigned number;
    if (std::fread(&number, sizeof number, 1, stdin) != 1) {
        device::fail("the call is cut short");
    }
    return number;
}

// Numbers of the call, in memory of their own that ends where the next page may not be touched.
static std::pair<unsigned *, size_t> read_buffer() {
    size_t count = read_number(), bytes = count * sizeof(unsigned), page = sysconf(_SC_PAGESIZE);
    size_t room = (bytes + page - 1) / page * page;
    char *memory = (char *)mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + room, page, PROT_NONE) != 0) {
        device::fail("no memory");
    }
    unsigned *numbers = (unsigned *)(memory + room - bytes);
    if (std::fread(numbers, sizeof(unsigned), count, stdin) != count) {
        device::fail("the call is cut short");
    }
    return {numbers, count};
}

static std::vector<unsigned *> pointers;
static std::vector<unsigned> scalars;
static size_t next_pointer, next_scalar;

// The next argument of a type.
template <typename T>
T next() {
    if constexpr (std::is_pointer_v<T>) {
        return (T)pointers.at(next_pointer++);
    } else {
        T value;
        std::memcpy(&value, &scalars.at(next_scalar++), sizeof value);
        return value;
    }
}

// A call of `kernel` with the arguments that were read.
template <typename... Arguments>
std::function<void()> call(void (*kernel)(Arguments...)) {
    std::tuple<Arguments...> arguments{next<Arguments>()...};
    if (next_pointer != pointers.size() || next_scalar != scalars.size()) {
        device::fail("the kernel takes other arguments");
    }
    return [=] { std::apply(kernel, arguments); };
}

static std::function<void()> call_of(const std::string &name) {
    if (name == "add_bias") return call(add_bias);
    if (name == "add_bias_and_residual") return call(add_bias_and_residual);
    if (name == "attend") return call(attend);
    if (name == "attend_cached") return call(attend_cached);
    if (name == "gate") return call(gate);
    if (name == "norm_heads") return call(norm_heads);
    if (name == "norm_rows") return call(norm_rows);
    if (name == "pool") return call(pool);
    if (name == "rotate") return call(rotate);
    if (name == "write_cache") return call(write_cache);
    device::fail("no such kernel");
}

int main() {
    size_t length = read_number();
    std::string name;
    for (size_t at = 0; at < length; at += sizeof(unsigned)) {
        unsigned four = read_number();
        name.append((const char *)&four, sizeof four);
    }
    name.resize(length);
    Index grid;
    grid.x = read_number();
    grid.y = read_number();
    grid.z = read_number();
    unsigned threads = read_number(), floats = read_number();
    if (floats > SHARED_FLOATS) {
        device::fail("too much is shared");
    }
    size_t out_count = 0;
    for (unsigned left = read_number(); left > 0; left--) {
        auto [numbers, count] = read_buffer();
        out_count = pointers.empty() ? count : out_count;
        pointers.push_back(numbers);
    }
    for (unsigned left = read_number(); left > 0; left--) {
        scalars.push_back(read_number());
    }
    auto prepare = [] { std::fill((unsigned *)shared, (unsigned *)shared + SHARED_FLOATS, UNTOUCHED); };
    auto inspect = [floats] {
        for (size_t at = floats; at < SHARED_FLOATS; at++) {
            if (((unsigned *)shared)[at] != UNTOUCHED) {
                device::fail("more is shared than was asked for");
            }
        }
    };
    device::launch(grid, threads, call_of(name), prepare, inspect);
    return std::fwrite(pointers.at(0), sizeof(unsigned), out_count, stdout) == out_count ? 0 : 1;
}
