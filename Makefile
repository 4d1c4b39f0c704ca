# Spillway. `make help` lists the targets; sources are found by folder, so a new file needs no line here.

# Scripts compute with awk, which reads 1.5 as 1 where numbers are written 1,5.
export LC_ALL := C

VARIANT ?= release
CC      ?= gcc
BUILD   := build/$(VARIANT)
NPROC   := $(shell nproc 2>/dev/null || echo 2)
MODULES := runtime/base aio cpu_adam gpu gpu/cpu offload runtime runtime/comm runtime/nn runtime/data runtime/files

PKGS     := openblas numa jansson libxxhash libisal libpcre2-8 libutf8proc
HAVE     := $(shell for p in $(PKGS) liburing cmocka; do pkg-config --exists $$p 2>/dev/null && echo $$p; done)
MPI_PKG  := $(firstword $(shell for p in ompi-c mpich mpi-c; do pkg-config --exists $$p 2>/dev/null && echo $$p; done))
MPICC    := $(shell command -v mpicc 2>/dev/null)
MPI      ?= $(if $(MPI_PKG)$(MPICC),1,0)
MISSING  := $(filter-out $(HAVE),$(PKGS))
URING    ?= $(if $(filter liburing,$(HAVE)),1,0)

# A younger compiler warns of more: that stops whoever works on this (WERROR=1, as before every push), not who builds it.
ERRORS   := $(if $(filter 1,$(WERROR)),-Werror)
WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla $(ERRORS) -Wno-format-truncation -Wno-unknown-pragmas $(if $(findstring clang,$(CC)),-Wno-unknown-warning-option -Wno-missing-field-initializers)
CPPFLAGS := -D_GNU_SOURCE $(addprefix -I,runtime/base aio cpu_adam gpu offload runtime runtime/comm runtime/nn runtime/data runtime/files)
CFLAGS_release := -O3 -g
CFLAGS_debug   := -O0 -g -DSPW_CHECKED
# -g1: lines for backtraces; all of what a debugger knows makes the build a third slower (debug has it).
CFLAGS_checked := -O2 -g1 -DSPW_CHECKED
# What AddressSanitizer finds by itself is not looked at twice: a fifth of the program, and of its time.
CFLAGS_asan    := -O1 -g1 -DSPW_CHECKED -fsanitize=address,undefined -fno-sanitize=null,object-size -fno-sanitize-recover=all -fno-omit-frame-pointer
# The optimizer's vector kernels and those of the emulated device are hundreds of copies of the same loops: what a pointer that runs over
# leads to is found by address there. In the optimizer's accesses are calls besides, with which the compiler is through in a quarter of the
# time; other kernels, which run more than they are compiled, would be a third to twice slower.
FEWER_asan     := -fno-sanitize=pointer-overflow
# Of the emulated device's kernels it is not watched where in a function locals begin and end (the compiler warns of pointers that outlive
# them): what tells AddressSanitizer so is half of the time that the largest take to compile.
SCOPES_asan    := -fno-sanitize-address-use-after-scope
CALLS_asan     := $(FEWER_asan) $(if $(findstring clang,$(CC)),-mllvm -asan-instrumentation-with-call-threshold=0,--param asan-instrumentation-with-call-threshold=0)
CFLAGS_tsan    := -O1 -g1 -DSPW_CHECKED -fsanitize=thread -fno-omit-frame-pointer
CFLAGS   := -std=c11 -fPIC -pthread -ffp-contract=off -fno-math-errno $(WARN) $(CFLAGS_$(VARIANT)) $(EXTRA_CFLAGS)
LIBS     := $(shell pkg-config --libs $(filter $(PKGS),$(HAVE)) 2>/dev/null)
PKGFLAGS := $(shell pkg-config --cflags $(filter $(PKGS),$(HAVE)) 2>/dev/null)
ifeq ($(URING),1)
CPPFLAGS += -DSPW_HAVE_URING=1
LIBS     += -luring
endif
CPPFLAGS += $(PKGFLAGS)
LDLIBS   := $(LIBS) -lm -ldl -pthread

# What the compiler makes programs for, which may be another machine.
MACHINE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
ifeq ($(MACHINE),x86_64)
AVX2_FLAGS   := -mavx2 -mfma -mf16c
# Instructions in an order that hides their latency before registers are given out: 1 to 5 % for the kernels of packed state.
AVX512_FLAGS := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512 \
                $(if $(findstring clang,$(CC))$(filter asan tsan debug,$(VARIANT)),,-fschedule-insns -fsched-pressure)
endif

# The cuda device is a plugin that nothing links: built where nvcc is (CUDA=0 skips it), for CUDA_ARCHS, with PTX of the first
# for what comes after them; of the checked build, and for the demos, only where there is a GPU to run it. The emulated plugin is the same sources as C++ for the CPU, for tests without a GPU; sanitizers watch that one.
CXX        ?= g++
NVCC       ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
NVCC_HERE  := $(if $(NVCC),$(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'))
NVCC_OLD   := $(filter 7 8 9 10 11,$(firstword $(subst ., ,$(NVCC_HERE))))
NO_GPU     := $(if $(wildcard /dev/nvidiactl /dev/dxg),,1)
NO_USE     := $(if $(NO_GPU),$(filter demo demo-llama,$(MAKECMDGOALS))$(filter checked,$(VARIANT)))
CUDA       ?= $(if $(NVCC),$(if $(NVCC_OLD)$(filter asan tsan,$(VARIANT))$(NO_USE),0,1),0)
CUDA_HOME  ?= $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
ARCHS_ALL  := $(if $(filter release,$(VARIANT)),80 86 89 90 100 120,80)
ifeq ($(CUDA),1)
ifneq ($(or $(NVCC_OLD),$(if $(NVCC),,none)),)
$(error CUDA=1 and $(if $(NVCC),nvcc $(NVCC_HERE),no nvcc): install the CUDA toolkit, 12 or later, or say NVCC=/path/to/nvcc)
endif
# Of all architectures those that this nvcc knows; a driver makes younger ones' code from PTX.
ARCHS_HERE := $(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code))
NVCC_SMALL := $(if $(shell $(NVCC) --help | grep -e --compress-mode),--compress-mode=size)
endif
CUDA_ARCHS ?= $(filter $(ARCHS_HERE),$(ARCHS_ALL))
CUDA_SRC   := $(wildcard gpu/cuda/*.cu)
# PTX is made once for architectures whose machine code comes out the same to the byte (compared for every kernel, nvcc 13.0): half of
# the compiler's time. VIRTUAL_x: what x is made from, where that is another one.
VIRTUAL_86  := 80
VIRTUAL_90  := 89
VIRTUAL_120 := 100
virtual     = $(or $(VIRTUAL_$(1)),$(1))
comma       := ,
empty       :=
CUDA_GEN   := $(foreach v,$(sort $(foreach a,$(CUDA_ARCHS),$(call virtual,$(a)))),-gencode \
                arch=compute_$(v),code=[$(subst $(empty) $(empty),$(comma),$(strip $(foreach a,$(CUDA_ARCHS),$(if $(filter $(v),$(call virtual,$(a))),sm_$(a)))))]) \
              -gencode arch=compute_$(call virtual,$(firstword $(CUDA_ARCHS))),code=compute_$(call virtual,$(firstword $(CUDA_ARCHS)))
# Hopper's own instructions are in no other architecture's, nor in PTX for later ones.
HOPPER_GEN := $(if $(filter 90,$(CUDA_ARCHS)),-gencode arch=compute_90a$(comma)code=sm_90a -DSPW_SM_90A,$(CUDA_GEN))
CUDA_FLAGS := -std=c++17 -O3 $(NVCC_SMALL) -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,$(if $(ERRORS),-Werror$(comma))-Wno-unknown-warning-option,-Wno-unused-function,-Wno-format-truncation \
              $(if $(filter release,$(VARIANT)),,-DSPW_CHECKED)
# nvcc contracts a * b + c, and so does the emulation where the CPU can: equal bits that a rounding keeps apart show there too.
EMU_FMA    := $(if $(filter x86_64,$(MACHINE)),$(if $(shell grep -m1 -w fma /proc/cpuinfo 2>/dev/null),-mfma -mf16c -ffp-contract=fast,-ffp-contract=off),-ffp-contract=fast)
EMU_FLAGS  := -std=c++17 -fPIC -pthread -fvisibility=hidden -fno-exceptions $(EMU_FMA) -Wall -Wextra $(ERRORS) -Wno-unused-function \
              -Wno-unknown-pragmas -Wno-format-truncation $(if $(filter tsan,$(VARIANT)),-O1 -g1,$(CFLAGS_$(VARIANT))) $(FEWER_$(VARIANT)) $(SCOPES_$(VARIANT))
# Once more with kernels that tell of each access (tests/emulate/races.h).
TELLING    := -DSPW_EMULATE_RACES -fsanitize=thread --param tsan-instrument-func-entry-exit=0
# A name that nobody defines, such as an operation that was forgotten, is an error when a plugin is linked, not when it is opened;
# a sanitizer's are the program's.
NO_GAPS    := $(if $(filter asan tsan,$(VARIANT)),,-Wl,-z,defs)
CUDA_PLUGIN := $(if $(filter 1,$(CUDA)),$(BUILD)/spillway-cuda.so)
EMULATED   := $(if $(shell command -v $(CXX) 2>/dev/null),$(BUILD)/emulated/spillway-cuda.so $(BUILD)/emulated/libnccl.so.2 $(BUILD)/emulated/libcublasLt.so.0)

MPI_SRC  := runtime/comm/mpi.c
LIB_SRC  := $(filter-out $(MPI_SRC),$(foreach m,$(MODULES),$(wildcard $(m)/*.c)))
LIB_OBJ  := $(LIB_SRC:%.c=$(BUILD)/%.o)
CLI_OBJ  := $(patsubst %.c,$(BUILD)/%.o,$(wildcard cli/*.c))
TEST_SRC := $(wildcard tests/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(BUILD)/%)
TEST_LIB := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/lib_*.c))
EX_BIN   := $(patsubst %.c,$(BUILD)/%,$(wildcard examples/*.c))

.DEFAULT_GOAL := all
.SECONDARY:
GPU_KIT := build/gpu-kit
.PHONY: gpu-kit gpu-test gpu-bench all deps test-deps objects demo demo-llama test test-large check bench bench-adam bench-ahead bench-aio bench-comm bench-deepspeed bench-formats bench-gradients bench-checkpoint bench-network bench-save bench-sequences bench-step bench-sweep bench-zeropp asan tsan fuzz mutants races format lint install clean help tests tsan-tests

all: deps
	@$(MAKE) --no-print-directory -j$(NPROC) objects VARIANT=$(VARIANT) CUDA=$(CUDA)
	@ln -sf $(BUILD)/spillway spillway
	@cp -f $(BUILD)/libspillway.a $(BUILD)/libspillway.so $(MPI_PLUGIN) .
	@$(if $(CUDA_PLUGIN),,echo "no cuda device: $(if $(NVCC),$(if $(NVCC_OLD),nvcc $(NVCC_HERE) is too old$(comma) 12 is needed,$(if $(and $(NO_GPU),$(filter demo%,$(MAKECMDGOALS))),no GPU is here$(comma) and make builds it for others,CUDA=0)),no nvcc here; to add it install the CUDA toolkit$(comma) 12 or later)")

# A file of its own, so that the program starts where there is no MPI; without headers for it there is none.
ifeq ($(MPI),1)
ifeq ($(MPI_PKG)$(MPICC),)
$(error no MPI: to add it: apt install libopenmpi-dev openmpi-bin)
endif
MPI_PLUGIN  := $(BUILD)/spillway-mpi.so
ifneq ($(MPI_PKG),)
MPI_COMPILE := $(CC) $(shell pkg-config --cflags $(MPI_PKG) 2>/dev/null)
MPI_LIBS    := $(shell pkg-config --libs $(MPI_PKG) 2>/dev/null)
else
MPI_COMPILE := OMPI_CC=$(CC) MPICH_CC=$(CC) mpicc
endif
$(BUILD)/spillway-mpi.so: $(MPI_SRC)
	@mkdir -p $(@D) && echo "  CC $<" && $(MPI_COMPILE) $(CPPFLAGS) $(CFLAGS) -MMD -MP -MF $(@:.so=.d) -shared $< -o $@ $(MPI_LIBS) -pthread
-include $(BUILD)/spillway-mpi.d
# The benchmark calls MPI's own collectives too.
$(BUILD)/tests/bench_comm: tests/bench_comm.c $(BUILD)/libspillway.a $(MPI_PLUGIN)
	@mkdir -p $(@D) && $(MPI_COMPILE) -DSPW_BENCH_MPI $(CPPFLAGS) $(CFLAGS) -o $@ tests/bench_comm.c $(BUILD)/libspillway.a $(MPI_LIBS) $(LDLIBS)
endif

objects: $(BUILD)/libspillway.a $(BUILD)/libspillway.so $(BUILD)/spillway $(EX_BIN) $(MPI_PLUGIN) $(CUDA_PLUGIN)

# Packages that are missing are installed with apt when that is possible; otherwise the command is printed.
deps:
	@sh tools/deps.sh
test-deps:
	@sh tools/deps.sh python3 g++

$(BUILD)/libspillway.a: $(LIB_OBJ)
	@rm -f $@ && ar rcs $@ $^

$(BUILD)/libspillway.so: $(LIB_OBJ)
	@$(CC) -shared -Wl,-soname,$(@F) $(CFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/spillway: $(CLI_OBJ) $(BUILD)/libspillway.a
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/examples/%: $(BUILD)/examples/%.o $(BUILD)/libspillway.a
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

# A hundred programs with all of the library: lld, where it is there, has them in half of the time.
TEST_LINKER := $(if $(shell command -v ld.lld 2>/dev/null),-fuse-ld=lld)
$(BUILD)/tests/test_%: $(BUILD)/tests/test_%.o $(TEST_LIB) $(BUILD)/libspillway.a
	@$(CC) $(CFLAGS) $(TEST_LINKER) -o $@ $^ $(LDLIBS) -lcmocka

$(BUILD)/tests/bench_%: $(BUILD)/tests/bench_%.o $(BUILD)/libspillway.a
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

$(BUILD)/%_avx2.o: %_avx2.c
	@mkdir -p $(@D) && echo "  CC $<" && $(CC) $(CPPFLAGS) $(CFLAGS) $(AVX2_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%_avx512.o: %_avx512.c
	@mkdir -p $(@D) && echo "  CC $<" && $(CC) $(CPPFLAGS) $(CFLAGS) $(AVX512_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/cpu_adam/%_avx2.o $(BUILD)/cpu_adam/%_avx512.o: CFLAGS += $(CALLS_$(VARIANT))

# Comparisons that might trap would keep the weights of candidates from vector instructions.
$(BUILD)/runtime/generate_sample.o: CFLAGS += -fno-trapping-math

# gcc 12 ends with an error of its own where a loop has a fmax() for aarch64, as tests do.
ifeq ($(MACHINE),aarch64)
$(BUILD)/tests/%.o: CFLAGS += -fno-tree-loop-vectorize
endif

# By this comm.c tells ranks of one version and other sources apart, whatever compiled them.
SOURCES := $(shell cat $(sort $(foreach m,$(MODULES) cli,$(wildcard $(m)/*.[ch]))) | cksum | cut -d' ' -f1)
$(BUILD)/runtime/comm/comm.o: CPPFLAGS += -DSPW_SOURCES=$(SOURCES)u
$(BUILD)/runtime/comm/comm.o: $(BUILD)/sources
.PHONY: always
$(BUILD)/sources: always
	@mkdir -p $(@D); echo $(SOURCES) | cmp -s - $@ || echo $(SOURCES) >$@

$(BUILD)/%.o: %.c
	@mkdir -p $(@D) && echo "  CC $<" && $(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/gpu/cuda/attention_hopper.cu.o $(BUILD)/gpu/cuda/each_hopper.cu.o: CUDA_GEN := $(HOPPER_GEN)

$(BUILD)/%.cu.o: %.cu Makefile
	@mkdir -p $(@D) && echo "  NVCC $<" && $(NVCC) -D_GNU_SOURCE -Iruntime/base -Igpu $(CUDA_FLAGS) $(CUDA_GEN) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

# Its own copy of what it needs of the base, and no name but one: it lives beside the program's.
$(BUILD)/spillway-cuda.so: $(CUDA_SRC:%=$(BUILD)/%.o) $(BUILD)/libspillway.a
	@$(CC) -shared -static-libgcc $(CFLAGS_$(VARIANT)) -o $@ $^ $(NO_GAPS) -Wl,--exclude-libs,ALL,--as-needed -L$(CUDA_HOME)/lib64 -lcudart_static $(LDLIBS) -lrt

$(BUILD)/emulated/%.o: %.cu
	@mkdir -p $(@D) && echo "  CXX $<" && $(CXX) -D_GNU_SOURCE -Itests/emulate -Iruntime/base -Igpu $(EMU_FLAGS) -MMD -MP -x c++ -c $< -o $@

$(BUILD)/emulated/%.o: %.cpp
	@mkdir -p $(@D) && echo "  CXX $<" && $(CXX) -D_GNU_SOURCE -Itests/emulate -Iruntime/base -Igpu -Igpu/cuda $(EMU_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/races/%.o: %.cu
	@mkdir -p $(@D) && echo "  CXX $<" && $(CXX) -D_GNU_SOURCE -Itests/emulate -Iruntime/base -Igpu -Igpu/cuda $(EMU_FLAGS) $(TELLING) -MMD -MP -x c++ -c $< -o $@

$(BUILD)/races/%.o: %.cpp
	@mkdir -p $(@D) && echo "  CXX $<" && $(CXX) -D_GNU_SOURCE -Itests/emulate -Iruntime/base $(EMU_FLAGS) -DSPW_EMULATE_RACES -MMD -MP -c $< -o $@

RACES_OBJ := $(BUILD)/races/tests/emulate/emulate.o $(BUILD)/races/tests/emulate/races.o
$(BUILD)/emulated/spillway-cuda.so: $(CUDA_SRC:%.cu=$(BUILD)/emulated/%.o) $(BUILD)/emulated/tests/emulate/emulate.o $(BUILD)/libspillway.a
$(BUILD)/races/spillway-cuda.so: $(CUDA_SRC:%.cu=$(BUILD)/races/%.o) $(RACES_OBJ) $(BUILD)/libspillway.a
$(BUILD)/emulated/spillway-cuda.so $(BUILD)/races/spillway-cuda.so:
	@$(CXX) -shared $(EMU_FLAGS) -o $@ $^ $(NO_GAPS) -Wl,--exclude-libs,ALL,--as-needed $(LDLIBS)

$(BUILD)/races/control: $(BUILD)/races/tests/emulate/control.o $(RACES_OBJ) $(BUILD)/libspillway.a
	@$(CXX) $(EMU_FLAGS) -o $@ $^ $(LDLIBS)

# NCCL for the emulated device: ranks are processes, streams are the plugin's.
$(BUILD)/emulated/libnccl.so.2: $(BUILD)/emulated/tests/emulate/nccl.o $(BUILD)/emulated/spillway-cuda.so
	@$(CXX) -shared $(EMU_FLAGS) -o $@ $< -L$(BUILD)/emulated -l:spillway-cuda.so -Wl,-rpath,'$$ORIGIN' -lrt

# And cuBLASLt, under a version that nobody has.
$(BUILD)/%/libcublasLt.so.0: $(BUILD)/emulated/tests/emulate/cublaslt.o $(BUILD)/%/spillway-cuda.so
	@$(CXX) -shared $(EMU_FLAGS) -o $@ $< -L$(@D) -l:spillway-cuda.so -Wl,-rpath,'$$ORIGIN' -L$(BUILD) -l:libspillway.a $(LDLIBS)

-include $(BUILD)/emulated/tests/emulate/nccl.d $(BUILD)/emulated/tests/emulate/cublaslt.d
-include $(CUDA_SRC:%=$(BUILD)/%.d) $(CUDA_SRC:%.cu=$(BUILD)/emulated/%.d) $(BUILD)/emulated/tests/emulate/emulate.d
-include $(LIB_OBJ:.o=.d) $(CLI_OBJ:.o=.d) $(TEST_BIN:=.d) $(TEST_LIB:.o=.d) $(EX_BIN:=.d)

-include $(CUDA_SRC:%.cu=$(BUILD)/races/%.d) $(RACES_OBJ:.o=.d) $(BUILD)/races/tests/emulate/control.d

tests: $(TEST_BIN) $(MPI_PLUGIN) $(EMULATED) $(if $(EMULATED),$(if $(filter checked,$(VARIANT)),$(BUILD)/races/control))

# What a newcomer runs: everything built with assertions on, every test, one closing line.
test: test-deps
	@$(MAKE) --no-print-directory -j$(NPROC) objects tests VARIANT=checked
	@sh tests/run.sh build/checked

asan: test-deps
	@$(MAKE) --no-print-directory -j$(NPROC) objects tests VARIANT=asan
	@sh tests/run.sh build/asan

tsan: test-deps
	@$(MAKE) --no-print-directory -j$(NPROC) objects tests VARIANT=tsan
	@sh tests/run.sh build/tsan

# Every operation once on the emulated device with kernels that tell of each access: what nothing orders is an error. Five minutes.
races: test-deps
	@$(MAKE) --no-print-directory -j$(NPROC) $(addprefix build/checked/,races/spillway-cuda.so races/libcublasLt.so.0 races/control tests/test_cuda_emulated) VARIANT=checked
	@build/checked/races/control 2>/dev/null
	@SPW_EMULATE_RACES=1 build/checked/tests/test_cuda_emulated

check: export WERROR := 1
check: lint test asan

demo: all
	@sh examples/demo.sh "$(DATA)"

# A small Llama folder: trained, fine-tuned with LoRA, merged, exported. DATA: text to fine-tune on.
demo-llama: all
	@sh examples/demo_llama.sh $(if $(DATA),"$(DATA)")

# A folder of 4 GB imported and fine-tuned within 1 GiB of memory; 13 GB of disk below DIR (default: this folder), two minutes.
test-large: all
	@bash tests/large_import.sh $(or $(DIR),.)

bench: all
	@sh tests/bench.sh

# aio beside fio on the disk of DIR (default: this folder), about six minutes.
bench-aio: all
	@$(MAKE) --no-print-directory build/release/tests/bench_aio
	@build/release/tests/bench_aio $(or $(DIR),.) $(or $(ROUNDS),5)

# The optimizers beside memory, with one thread and with all; beside PyTorch's where that is installed. Fails where a
# row is below its limit (spillway bench --help), after it has shown all.
bench-adam: all
	@rc=0; ./spillway bench adam --check --threads 1 || rc=1; ./spillway bench adam --check || rc=1; \
	./spillway bench adam --check --optimizer adagrad --optimizer lion --optimizer sgd --grad bf16 --threads 1 || rc=1; \
	./spillway bench adam --grad bf16 || rc=1; \
	if python3 -c 'import torch' 2>/dev/null; then python3 examples/pytorch_adam.py || rc=1; else echo "no PyTorch here"; fi; \
	exit $$rc

# Ranks of this host beside a plain copy and, with an MPI launcher, beside MPI's own.
bench-comm: all
	@$(MAKE) --no-print-directory build/release/tests/bench_comm
	@build/release/tests/bench_comm $(or $(MIB),256) $(or $(ROUNDS),9)
	@[ -z "$(MPI_PLUGIN)" ] || ! command -v mpirun >/dev/null || for n in 2 4; do OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
		mpirun -n $$n --oversubscribe build/release/tests/bench_comm $(or $(MIB),256) $(or $(ROUNDS),9); done

# Predicted over measured steps of ranks on two hosts, in network namespaces with links of several rates (RATES='500mbit 2gbit 8gbit').
bench-network: all
	@bash tests/bench_network.sh $(or $(RANKS),2) $(or $(STEPS),12) $(RATES)

# Four ranks on two hosts, in network namespaces with a slow link between them (RATE=1gbit): with and without ZeRO++.
bench-zeropp: all
	@bash tests/bench_zeropp.sh $(or $(RATE),1gbit) $(or $(STEPS),12)

# Two ranks that share sequences beside two that have their own; about two minutes.
bench-sequences: all
	@bash tests/bench_sequences.sh $(or $(ROUNDS),5) $(TOKENS)

# The same configuration in DeepSpeed, on this processor; PYTHON has torch, transformers and deepspeed. About half an hour.
bench-deepspeed: all
	@$(or $(PYTHON),python3) tests/bench_deepspeed.py --rounds $(or $(ROUNDS),3) $(if $(DIR),--dir $(DIR))

# Training steps by placement: bound over measured, waits by cause; about four minutes.
bench-step: all
	@sh tests/bench_step.sh $(or $(ROUNDS),3) $(DIR)

# Gradients on nvme beside gradients in host memory; about five minutes.
bench-ahead: all
	@sh tests/bench_ahead.sh $(or $(ROUNDS),5) $(DIR)

bench-gradients: all
	@sh tests/bench_gradients.sh $(or $(ROUNDS),4) $(DIR)

# A run that saves beside one that does not, in the background and waiting; about five minutes.
bench-save: all
	@sh tests/bench_save.sh $(or $(ROUNDS),5) $(DIR)

# Rates of saving and loading beside the disk's; half a minute, 8 GB of DIR.
bench-checkpoint: all
	@$(MAKE) --no-print-directory build/release/tests/bench_checkpoint
	@build/release/tests/bench_checkpoint $(or $(DIR),.) $(or $(ROUNDS),7)

# Tokens/s over eleven host budgets, in about two minutes.
bench-sweep: all
	@sh tests/bench_sweep.sh $(or $(ROUNDS),5) $(DIR)

# What lossy state formats cost in loss, about half an hour.
bench-formats: all
	@sh tests/bench_formats.sh $(or $(STEPS),1000)

# A folder with all that a GPU machine needs (it may have no compiler and no network); tests and benchmarks run from it.
gpu-kit:
	@$(MAKE) --no-print-directory -j$(NPROC) objects build/release/tests/test_cuda build/release/tests/test_link build/release/tests/test_gpu_ops build/release/tests/test_gpu_attention VARIANT=release
	@if [ -f build/release/spillway-cuda.so ]; then sh tests/gpu_kit.sh build/release $(GPU_KIT); else echo "no nvcc: no cuda device to test"; fi

# 77 says that there is no GPU here: no failure of the build.
gpu-test: gpu-kit
	@sh $(GPU_KIT)/run.sh test racecheck; rc=$$?; [ $$rc -eq 77 ] || exit $$rc

gpu-bench: gpu-kit
	@sh $(GPU_KIT)/run.sh bench; rc=$$?; [ $$rc -eq 77 ] || exit $$rc

fuzz: deps
	@sh tests/fuzz.sh

# Each wait for a queue taken out, one at a time: which test misses it. An hour; WAITS=pattern of file:line.
mutants: deps
	@bash tests/mutate_waits.sh '$(WAITS)'

lint:
	@sh tools/lint.sh

format:
	@clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp')

PREFIX  ?= /usr/local
VERSION := $(shell sed -n 's/.*SPW_VERSION "\(.*\)".*/\1/p' runtime/base/spw_base.h)
# What is installed stays together when the folder is moved: programs are built with what pkg-config says of spillway (with --static, where libspillway.a is alone).
install: all
	@mkdir -p "$(DESTDIR)$(PREFIX)/bin" "$(DESTDIR)$(PREFIX)/lib/pkgconfig" "$(DESTDIR)$(PREFIX)/include/spillway"
	@cp $(BUILD)/spillway "$(DESTDIR)$(PREFIX)/bin/spillway"
	@cp $(BUILD)/libspillway.a $(BUILD)/libspillway.so $(CUDA_PLUGIN) "$(DESTDIR)$(PREFIX)/lib/"
	@[ -z "$(MPI_PLUGIN)" ] || { mkdir -p "$(DESTDIR)$(PREFIX)/lib/spillway" && cp $(MPI_PLUGIN) "$(DESTDIR)$(PREFIX)/lib/spillway/"; }
	@cp $(wildcard $(addsuffix /spw_*.h,$(MODULES))) runtime/spillway.h "$(DESTDIR)$(PREFIX)/include/spillway/"
	@printf '%s\n' 'prefix=$${pcfiledir}/../..' '' 'Name: spillway' 'Description: trains models whose state is in host memory and on disks' \
		'Version: $(VERSION)' 'Cflags: -I$${prefix}/include/spillway' 'Libs: -L$${prefix}/lib -lspillway' 'Libs.private: $(LDLIBS)' \
		>"$(DESTDIR)$(PREFIX)/lib/pkgconfig/spillway.pc"

clean:
	@rm -rf build spillway libspillway.a libspillway.so spillway-mpi.so demo-out demo-llama-out

help:
	@echo "make          build ./spillway, libspillway.a and libspillway.so"
	@echo "make demo     train a small GPT whose state streams from disk (DATA=path-or-glob for another text)"
	@echo "make demo-llama  train a small Llama, fine-tune its folder with LoRA, merge, export, generate"
	@echo "make test     build and run every test; closes with 'N passed, N failed, N skipped'"
	@echo "make test-large  a folder of 4 GB is imported and fine-tuned within 1 GiB (DIR=folder with 13 GB free)"
	@echo "make check    lint, test and asan: what runs before a push"
	@echo "make asan     the tests under AddressSanitizer and UBSan      make tsan   under ThreadSanitizer"
	@echo "make races    kernels, in emulation, whose threads touch what nothing orders"
	@echo "make bench    benchmarks (nothing timed is a test)            make fuzz   parsers under libFuzzer (clang)"
	@echo "make bench-adam optimizers beside memory bandwidth and PyTorch; fails where a row is below its limit"
	@echo "make bench-step     training steps by placement: bound over measured, waits by cause"
	@echo "make bench-formats  the loss of a small GPT in every state format (STEPS=1000)"
	@echo "make bench-ahead  updates before the norm is known, beside those that wait and those without clipping (ROUNDS=5, RATE=bytes/s)"
	@echo "make bench-gradients  what gradients on nvme cost: step, bytes, host memory (ROUNDS=4)"
	@echo "make mutants  takes each wait for a queue out in turn: which test misses it (WAITS=file:line)"
	@echo "make bench-save   a run that saves beside one that does not (ROUNDS=5; RATE=bytes/s: to a slow disk)"
	@echo "make bench-checkpoint  rates of saving and loading beside the disk's (DIR=folder on the disk, ROUNDS=7)"
	@echo "make bench-sweep  tokens/s over eleven host budgets; fails where more memory is slower (ROUNDS=5)"
	@echo "make bench-aio  file transfers beside fio (DIR=folder on the disk, ROUNDS=5)"
	@echo "make bench-comm  ranks of this host beside a plain copy and MPI (MIB=256, ROUNDS=9)"
	@echo "make bench-deepspeed  step, memory, bytes and losses beside DeepSpeed's (PYTHON=python with torch, transformers, deepspeed)"
	@echo "make bench-network  steps between two hosts as predicted (RANKS=2, STEPS=12, RATES='500mbit 2gbit 8gbit')"
	@echo "make bench-sequences  ranks that share sequences beside ranks that have their own (ROUNDS=5, TOKENS=1024)"
	@echo "make bench-zeropp  ZeRO++ on two hosts with a slow link between them (RATE=1gbit, STEPS=12)"
	@echo "make gpu-test build/gpu-kit: the tests of the cuda device for a machine with a GPU; runs them if this is one"
	@echo "make gpu-bench  products, attention, copies and training on the GPU, from the same kit"
	@echo "make lint     include direction, formatting, names            make format clang-format in place"
	@echo "make install  PREFIX=/usr/local  DESTDIR=                     make clean"
	@echo "variables     VARIANT=release|debug|checked|asan|tsan  CC=gcc|clang  URING=0|1  MPI=0|1  CUDA=0|1  CUDA_ARCHS=\"80 86 89 90 100 120\"  WERROR=1: warnings are errors"
