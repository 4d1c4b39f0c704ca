/* See lib_ranks.h. */
#include "lib_ranks.h"
#include "lib_tiny.h"
#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

enum { RANKS_MAX = 8, MESSAGE_BYTES = sizeof((spw_error *)0)->message };

void *
ranks_share(uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

void
ranks_unshare(void *memory, uint64_t bytes)
{
    munmap(memory, bytes);
}

static void
set_number(const char *name, uint32_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%u", value);
    setenv(name, text, 1);
}

static int
rank_main(uint32_t ranks, uint32_t rank, uint32_t port, const spw_comm_options *options, ranks_fn fn, void *ctx,
          char *message)
{
    spw_comm_options o = *options;
    spw_error err = {0};
    spw_comm *comm = NULL;
    spw_status st;
    o.backend = SPW_COMM_TCP;
    o.timeout_s = 100; /* a slow disk holds all of them up */
    set_number("RANK", rank);
    set_number("WORLD_SIZE", ranks);
    set_number("MASTER_PORT", port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    st = spw_comm_open(&comm, &o, &err);
    if (st == SPW_OK)
        st = fn(ctx, comm, rank, &err);
    if (st == SPW_OK)
        spw_comm_close(comm);
    snprintf(message, MESSAGE_BYTES, "%s", st == SPW_OK ? "" : err.message);
    return st == SPW_OK ? 0 : 1;
}

/* Other tests may be looking for one at this moment: who has the name in the abstract namespace has the port. */
static bool
port_is_ours(uint32_t port)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int own = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fd, rc;
    assert_true(own >= 0);
    snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "spw-test-port-%u", port);
    if (bind(own, (struct sockaddr *)&name, sizeof name) != 0) {
        close(own);
        return false;
    }
    fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    rc = bind(fd, (struct sockaddr *)&at, sizeof at);
    close(fd);
    if (rc != 0)
        close(own);
    return rc == 0; /* the name is kept until this process ends */
}

uint32_t
ranks_port(void)
{
    static uint32_t port;
    do
        port = port == 0 ? 10000 + (uint32_t)getpid() % 10000 : port + 1;
    while (!port_is_ours(port));
    return port;
}

void
ranks_run(uint32_t ranks, const spw_comm_options *options, ranks_fn fn, void *ctx)
{
    ranks_on_hosts(0, ranks, options, fn, ctx);
}

void
ranks_on_hosts(uint32_t per_host, uint32_t ranks, const spw_comm_options *options, ranks_fn fn, void *ctx)
{
    char(*messages)[MESSAGE_BYTES];
    pid_t pids[RANKS_MAX];
    uint32_t port;
    bool failed = false;
    if (ranks == 1) {
        spw_error err = {0};
        if (fn(ctx, NULL, 0, &err) != SPW_OK)
            fail_msg("one rank: %s", err.message);
        return;
    }
    assert_true(ranks <= RANKS_MAX);
    messages = ranks_share(RANKS_MAX * sizeof *messages);
    port = ranks_port();
    fflush(NULL);
    for (uint32_t i = 0; i < ranks; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            alarm(300);
            if (per_host > 0)
                set_number("SPW_HOST", i / per_host);
            _exit(rank_main(ranks, i, port, options, fn, ctx, messages[i]));
        }
    }
    for (uint32_t i = 0; i < ranks; i++) {
        int status = 0;
        (void)waitpid(pids[i], &status, 0);
        failed = failed || status != 0;
        if (status != 0)
            print_error("rank %u of %u: status %d: %s\n", i, ranks, status, messages[i]);
    }
    ranks_unshare(messages, RANKS_MAX * sizeof *messages);
    assert_false(failed);
}

void
ranks_config(spw_config *c, spw_state_format format)
{
    tiny_config(c, format);
    c->optimizer.eps = 1e-3; /* where a gradient is rounding alone, m / sqrt(v) would be 1 */
    c->optimizer.lr = 1e-2;
    c->run.chunk_elems = 4096;
    c->run.optimizer_threads = 2;
    c->run.compute_threads = 1;
}

void
ranks_use_dir(spw_config *c, const char *dir)
{
    c->zero.param_path.count = c->zero.optimizer_path.count = 1;
    snprintf(c->zero.param_path.item[0], SPW_PATH_BYTES, "%s", dir);
    snprintf(c->zero.optimizer_path.item[0], SPW_PATH_BYTES, "%s", dir);
}
