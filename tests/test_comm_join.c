/*
 * test_comm_join.c - how a world of spw_comm.h comes together, with real processes: who does not come, comes twice, late, from elsewhere or as
 * another program, what launchers leave in the environment, and what becomes of the others.
 */
#include "comm/comm_tcp.h"
#include "lib_comm_worlds.h"
#include "lib_ranks.h"
#include "lib_tiny.h"

#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

static void
body_missing(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    uint64_t begin = spw_now_ns();
    if (p->variant > 0)
        setenv("SPW_JOIN_TIMEOUT", "4", 1);
    CHECK(spw_comm_open(&comm, &p->options, &e) != SPW_OK && comm == NULL, "opened");
    expect(&e, SPW_ETIMEDOUT, "did not come in 4.0 s", "2");
    CHECK(spw_now_ns() - begin < AT_ONCE_NS, "took %.1f s", (double)(spw_now_ns() - begin) * 1e-9);
}

/* A rank that never joins is named to all others; the environment says how long they wait for it. */
static void
test_missing(void **state)
{
    (void)state;
    plans_run((plan[]){{.hosts = "aaa", .present = 2, .body = body_missing, .options = {.timeout_s = 4}, .killed = -1},
                       {.hosts = "abc", .present = 2, .body = body_missing, .options = {.timeout_s = 4}, .killed = -1},
                       {.hosts = "abc",
                        .present = 2,
                        .body = body_missing,
                        .options = {.timeout_s = 60},
                        .variant = 1,
                        .killed = -1}},
              3);
}

static void
body_elsewhere(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    setenv("MASTER_ADDR", "192.0.2.1", 1); /* of nobody (RFC 5737) */
    CHECK(spw_comm_open(&comm, &p->options, &e) != SPW_OK && comm == NULL, "opened");
    expect(&e, SPW_ETIMEDOUT, "did not come in 0.5 s (SPW_JOIN_TIMEOUT): 1",
           "MASTER_ADDR 192.0.2.1 is no address of this host, where rank 0 runs");
}

/* Rank 0 on a host that MASTER_ADDR does not mean waits for ranks that look for it in another place, and says that. */
static void
test_elsewhere(void **state)
{
    (void)state;
    plan_run(
        (plan){.hosts = "ab", .present = 1, .body = body_elsewhere, .options = {.join_timeout_s = 0.5}, .killed = -1});
}

/* Rank 2 is admitted, and ends before it has said anything else. */
static void
body_ended_joining(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    spw__launch launch;
    spw__transport *t;
    OK(spw__launch_read(&launch, SPW_COMM_TCP, err));
    if (launch.rank == 2) {
        OK(spw__tcp_open(&t, &launch, spw_now_ns() + 60000000000u, 60, err));
        t->close(t, true);
        return;
    }
    CHECK(spw_comm_open(&comm, &p->options, &e) != SPW_OK && comm == NULL, "opened");
    expect(&e, SPW_EIO, "rank 2 has ended", "");
}

/* A rank that ends while the world is made is named to all others. */
static void
test_ended_joining(void **state)
{
    (void)state;
    plans_run((plan[]){{.hosts = "aaa", .body = body_ended_joining, .options = {.timeout_s = 60}, .killed = -1},
                       {.hosts = "abcd", .body = body_ended_joining, .options = {.timeout_s = 60}, .killed = -1}},
              2);
}

/* Said by rank 1 alone: there is one more. */
static void
body_refused(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    uint64_t begin = spw_now_ns();
    if (strcmp(getenv("RANK"), "1") == 0)
        setenv("WORLD_SIZE", "3", 1);
    CHECK(spw_comm_open(&comm, &p->options, &e) != SPW_OK && comm == NULL, "opened");
    expect(&e, SPW_ECONFIG, "rank 1 says that there are 3 ranks", "rank 0 that there are 2");
    CHECK(spw_now_ns() - begin < AT_ONCE_NS, "took %.1f s", (double)(spw_now_ns() - begin) * 1e-9);
}

/* A rank that rank 0 refuses hears why, and does not wait for a rank 0 that has gone. */
static void
test_refused(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "ab", .body = body_refused, .options = {.timeout_s = 60}, .killed = -1});
}

static void
body_other_version(const plan *p)
{
    spw_comm_options options = p->options;
    spw_comm *comm = NULL;
    spw_error e = {0};
    if (strcmp(getenv("RANK"), "1") == 0 && p->variant == 0)
        options.version = "0.0.7";
    else if (strcmp(getenv("RANK"), "1") == 0)
        options.sources = 7;
    CHECK(spw_comm_open(&comm, &options, &e) != SPW_OK && comm == NULL, "opened");
    expect(&e, SPW_ECONFIG,
           p->variant == 0 ? "rank 0 runs spillway " SPW_VERSION ", rank 1 0.0.7"
                           : "rank 0 runs spillway " SPW_VERSION ", rank 1 another build of " SPW_VERSION,
           "all hosts need the same");
}

/* Ranks of different versions are told, before they take each other's words for what these are not; of one version's sources, too. */
static void
test_other_version(void **state)
{
    (void)state;
    for (int variant = 0; variant < 2; variant++)
        plan_run((plan){.hosts = "aab",
                        .body = body_other_version,
                        .options = {.timeout_s = 60},
                        .variant = variant,
                        .killed = -1});
}

static _Atomic int *started_again;

static void
body_started_again(const plan *p)
{
    spw_comm *comm = NULL;
    int rank = atoi(getenv("RANK"));
    if (rank == 1) {
        pid_t first = fork();
        CHECK(first >= 0, "%d", (int)first);
        if (first == 0) {
            OK(spw_comm_open(&comm, &p->options, err));
            _exit(0);
        }
        usleep(500000); /* it waits for rank 2 */
        kill(first, SIGKILL);
        (void)waitpid(first, NULL, 0);
        ++*started_again;
        usleep(p->variant > 0 ? 500000 : 0); /* rank 2, the last one that was waited for, comes in between */
    }
    while (rank == 2 && *started_again == 0)
        usleep(1000);
    OK(spw_comm_open(&comm, &p->options, err));
    spw_comm_close(comm);
}

/* A rank that is ended while others are waited for, and started once more, has its place. */
static void
test_started_again(void **state)
{
    (void)state;
    started_again = ranks_share(sizeof(int));
    for (int between = 0; between < 2; between++) {
        *started_again = 0;
        plan_run((plan){.hosts = "aba",
                        .body = body_started_again,
                        .options = {.timeout_s = 60},
                        .variant = between,
                        .killed = -1});
    }
    ranks_unshare((void *)started_again, sizeof(int));
}

static void
body_quiet(const plan *p)
{
    spw_comm *comm = NULL;
    struct timespec before, after;
    OK(spw_comm_open(&comm, &p->options, err));
    if (spw_comm_get_info(comm)->rank == 1) {
        spw_comm_abort(comm, "enough");
    } else {
        while (spw_comm_check(comm, NULL) == SPW_OK)
            usleep(1000);
        usleep(300000); /* the other has gone */
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
        usleep(600000);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
        CHECK((double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) * 1e-9 < 0.2,
              "a processor is busy with nothing");
    }
    spw_comm_close(comm);
}

/* A rank of another host that has ended leaves nobody looking at its connection. */
static void
test_quiet(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "ab", .body = body_quiet, .options = {.timeout_s = 30}, .killed = -1});
}

/* A socket that fails when it is read, as one does whose other end has been silent for too long. */
static int
failing_socket(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int gone = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(bind(gone, (struct sockaddr *)&at, len) == 0 && getsockname(gone, (struct sockaddr *)&at, &len) == 0 &&
              connect(fd, (struct sockaddr *)&at, len) == 0,
          "%s", strerror(errno));
    close(gone);
    CHECK(send(fd, "", 1, 0) == 1, "%s", strerror(errno));
    return fd;
}

static void
body_unreachable(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    OK(spw_comm_open(&comm, &p->options, err));
    for (int fd = 3; fd < 100 && strcmp(getenv("RANK"), "0") == 0; fd++) {
        struct sockaddr_in other;
        socklen_t len = sizeof other;
        int in_its_place;
        if (getpeername(fd, (struct sockaddr *)&other, &len) != 0)
            continue;
        in_its_place = failing_socket();
        CHECK(dup2(in_its_place, fd) == fd, "%s", strerror(errno));
        close(in_its_place);
    }
    while (spw_comm_check(comm, &e) == SPW_OK)
        usleep(1000);
    if (strcmp(getenv("RANK"), "0") == 0)
        expect(&e, SPW_EIO, "rank 1 cannot be reached any more: its host or the network is gone (Connection refused)",
               "rank 1: cannot be reached");
    else
        expect(&e, SPW_EIO, "rank 0 has ended (pid", "rank 1: in no call");
    spw_comm_close(comm);
}

/* A connection that breaks is told from a process that ends: one looks for what has happened in another place. */
static void
test_unreachable(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "ab", .body = body_unreachable, .options = {.timeout_s = 60}, .killed = -1});
}

/* ---------------------------------------------------------------- how it was started */

static void
body_alone(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    spw_comm_options auto_options = {0}, tcp = {.backend = SPW_COMM_TCP};
    (void)p;
    unsetenv("WORLD_SIZE");
    CHECK(spw_comm_open(&comm, &tcp, &e) == SPW_ECONFIG && strstr(e.message, "WORLD_SIZE") != NULL, "%s", e.message);
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_ECONFIG &&
              strstr(e.message, "RANK is \"0\", but WORLD_SIZE is not set") != NULL,
          "%s", e.message);
    unsetenv("RANK");
    OK(spw_comm_open(&comm, &auto_options, err));
    CHECK(strcmp(spw_comm_get_info(comm)->backend, "self") == 0, "%s", spw_comm_get_info(comm)->backend);
    spw_comm_abort(comm, "enough");
    CHECK(spw_comm_check(comm, &e) == SPW_ECANCELED && strstr(e.message, "enough") != NULL, "%s", e.message);
    spw_comm_close(comm);
    setenv("WORLD_SIZE", "2x", 1);
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_ECONFIG && strstr(e.message, "2x") != NULL, "%s", e.message);
    setenv("WORLD_SIZE", "2", 1);
    setenv("RANK", "2", 1);
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_ECONFIG && strstr(e.message, "RANK") != NULL, "%s", e.message);
    setenv("RANK", "0", 1);
    unsetenv("MASTER_ADDR");
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_ECONFIG && strstr(e.message, "MASTER_ADDR") != NULL, "%s",
          e.message);
    unsetenv("RANK");
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_ECONFIG &&
              strstr(e.message, "WORLD_SIZE is \"2\", but RANK is not set") != NULL,
          "%s", e.message);
    setenv("WORLD_SIZE", "1", 1);
    OK(spw_comm_open(&comm, &auto_options, err));
    CHECK(strcmp(spw_comm_get_info(comm)->backend, "self") == 0, "%s", spw_comm_get_info(comm)->backend);
    spw_comm_close(comm);
    unsetenv("WORLD_SIZE");
    setenv("PMI_SIZE", "2", 1);
    setenv("SPW_MPI_PLUGIN", "/nowhere/plugin.so", 1);
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_EUNSUPPORTED && strstr(e.message, "/nowhere") != NULL, "%s",
          e.message);
    unsetenv("PMI_SIZE");
    setenv("SLURM_PROCID", "0", 1);
    setenv("SLURM_NTASKS", "1", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    OK(spw_comm_open(&comm, &auto_options, err));
    CHECK(strcmp(spw_comm_get_info(comm)->backend, "tcp") == 0, "%s", spw_comm_get_info(comm)->backend);
    spw_comm_close(comm);
    setenv("SPW_JOIN_TIMEOUT", "soon", 1);
    CHECK(spw_comm_open(&comm, &auto_options, &e) == SPW_ECONFIG && strstr(e.message, "soon") != NULL, "%s", e.message);
}

static void
body_no_name(const plan *p)
{
    spw_comm *comm = NULL;
    spw_error e = {0};
    char name[71] = "";
    memset(name, 'x', sizeof name - 1); /* longer than one may be: nobody is asked */
    setenv("RANK", "1", 1);
    setenv("MASTER_ADDR", name, 1);
    CHECK(spw_comm_open(&comm, &p->options, &e) == SPW_ECONFIG, "opened");
    expect(&e, SPW_ECONFIG, "rank 0 did not come in 0.5 s", "MASTER_ADDR xxx");
}

/* A rank that finds no address says so, and not that nobody listens there. */
static void
test_no_name(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        plan_run(
            (plan){.hosts = "ab", .present = 1, .body = body_no_name, .options = {.timeout_s = 0.5}, .killed = -1});
}

/* What an environment gives, and the backend that follows; mpi is not there, and says so. */
static const struct nested {
    const char *set, *backend;
} nests[] = {
    {"PMI_SIZE=2", "mpi"},
    {"PMIX_RANK=0", "mpi"},
    {"PMI_SIZE=1", "self"},                                                     /* mpirun -n 1 */
    {"PMI_RANK=0 PMIX_RANK=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4", "self"},   /* a shell of srun's */
    {"PMI_SIZE=1 SLURM_STEP_NUM_TASKS=1 OMPI_COMM_WORLD_SIZE=2", "mpi"},        /* mpirun in it */
    {"PMI_RANK=3 PMI_SIZE=4 RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1", "tcp"}, /* srun torchrun */
    {"OMPI_COMM_WORLD_SIZE=4 RANK=0 WORLD_SIZE=1", "mpi"},                      /* what is left of another launcher */
    {"SLURM_PROCID=0 SLURM_NTASKS=1 MASTER_ADDR=127.0.0.1", "tcp"},
    {"SLURM_PROCID=0 SLURM_NTASKS=1", "self"},
};

static void
body_nested(const plan *p)
{
    static const char *const names[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR"};
    const struct nested *n = &nests[p->variant];
    spw_comm *comm = NULL;
    spw_error e = {0};
    char text[200], *at = text, *pair;
    for (size_t i = 0; i < 3; i++)
        unsetenv(names[i]);
    setenv("SPW_MPI_PLUGIN", "/nowhere/plugin.so", 1);
    snprintf(text, sizeof text, "%s", n->set);
    while ((pair = strsep(&at, " ")) != NULL) {
        char *value = strchr(pair, '=');
        *value = '\0';
        setenv(pair, value + 1, 1);
    }
    if (spw_comm_open(&comm, NULL, &e) != SPW_OK) {
        CHECK(e.status == SPW_EUNSUPPORTED && strcmp(n->backend, "mpi") == 0, "%s: %s", n->set, e.message);
        return;
    }
    CHECK(strcmp(spw_comm_get_info(comm)->backend, n->backend) == 0, "%s: %s, %s", n->set,
          spw_comm_get_info(comm)->backend, spw_comm_get_info(comm)->reason);
    spw_comm_close(comm);
}

/* One launcher inside another, whose variables are inherited: the inner one counts. */
static void
test_nested(void **state)
{
    (void)state;
    for (int i = 0; i < (int)(sizeof nests / sizeof *nests); i++)
        plan_run((plan){.hosts = "a", .body = body_nested, .variant = i, .killed = -1});
}

/* What the environment says, and what is wrong with it. */
static void
test_environment(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "a", .body = body_alone, .killed = -1});
}

/* ---------------------------------------------------------------- strangers */

static void
body_strangers(const plan *p)
{
    const spw_comm_info *info;
    spw_comm *comm = NULL;
    if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0))
        exit(0);
    if (prctl(PR_SET_DUMPABLE, 0) != 0)
        exit(0);
    OK(spw_comm_open(&comm, &p->options, err));
    info = spw_comm_get_info(comm);
    if (info->host_count == info->world) { /* else this system lets them map each other's memory all the same */
        CHECK(strstr(info->reason, "no shared memory") != NULL, "%s", info->reason);
        CHECK(info->local_world == 1 && info->local_rank == 0, "%u of %u", info->local_rank, info->local_world);
        CHECK(info->machine == 0 && info->machine_rank == info->rank && info->machine_world == 3, "%u of %u on %u",
              info->machine_rank, info->machine_world, info->machine);
        CHECK(info->cpu_sharers == 3, "%u", info->cpu_sharers);
    } else if (info->rank == 0) {
        printf("# ranks map each other's memory, whatever prctl says\n");
        fflush(stdout);
    }
    spw_comm_close(comm);
}

/* Ranks that cannot map each other's memory are hosts of their own, and share the machine's memory and processors still. */
static void
test_strangers(void **state)
{
    (void)state;
    plan_run((plan){.hosts = "aaa", .body = body_strangers, .options = {.timeout_s = 30}, .killed = -1});
}

/* ---------------------------------------------------------------- connections */

static void
on_alarm(int number)
{
    (void)number;
}

/*
 * A rank that connects to one which is not ready yet goes on when a signal comes. Whoever listens here takes no more than two connections, so that
 * the next one's first packet is lost; it is sent again after a second.
 */
static void
test_signal_while_connecting(void **state)
{
    struct sigaction action = {.sa_handler = on_alarm}, before;
    struct sockaddr_storage at = {0};
    struct sockaddr_in *in = (struct sockaddr_in *)&at;
    socklen_t len = sizeof *in;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), first, second, fd;
    pid_t other;
    (void)state;
    *in = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(bind(listener, (struct sockaddr *)in, len), 0);
    assert_int_equal(listen(listener, 0), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)in, &len), 0);
    first = spw__tcp_connect(&at, spw_now_ns() + 20000000000u);
    assert_true(first >= 0);
    second = spw__tcp_connect(&at, spw_now_ns() + 50000000u); /* fails where one is enough */
    other = fork();
    assert_true(other >= 0);
    if (other == 0) {
        alarm(200);
        spw_sleep_ns(300000000);
        for (int k = 0; k < 3; k++)
            (void)accept(listener, NULL, NULL);
        _exit(0);
    }
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &(struct itimerval){.it_interval.tv_usec = 50000, .it_value.tv_usec = 50000}, NULL);
    fd = spw__tcp_connect(&at, spw_now_ns() + 20000000000u);
    setitimer(ITIMER_REAL, &(struct itimerval){.it_value.tv_sec = 0}, NULL);
    sigaction(SIGALRM, &before, NULL);
    kill(other, SIGKILL);
    (void)waitpid(other, NULL, 0);
    close(listener);
    close(first);
    if (second >= 0)
        close(second);
    assert_true(fd >= 0);
    close(fd);
}

/* What a connection of a link says first; tcp_link.c has it. */
typedef struct greeting {
    uint32_t magic, id;
    uint64_t cookie;
    uint32_t rank, unused;
} greeting;

/* A rank whose first words come late, as on a busy machine or a bad line, has its connection, and a stranger who says nothing holds nobody up. */
static void
test_late_greeting(void **state)
{
    const greeting says = {.magic = 0x53505722, .id = 7, .cookie = 99, .rank = 1};
    struct sockaddr_storage at = {0};
    struct sockaddr_in *in = (struct sockaddr_in *)&at;
    socklen_t len = sizeof *in;
    const uint32_t peers[] = {1};
    spw__tcp t = {.base = {.world = 2}, .cookie = 99, .listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    spw__link *link;
    spw_error err = {0};
    spw_status st;
    pid_t other;
    (void)state;
    *in = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(bind(t.listen_fd, (struct sockaddr *)in, len), 0);
    assert_int_equal(listen(t.listen_fd, 8), 0);
    assert_int_equal(getsockname(t.listen_fd, (struct sockaddr *)in, &len), 0);
    other = fork();
    assert_true(other >= 0);
    if (other == 0) {
        int stranger = spw__tcp_connect(&at, spw_now_ns() + 20000000000u);
        int fd = spw__tcp_connect(&at, spw_now_ns() + 20000000000u);
        alarm(200);
        usleep(2200000);
        (void)spw__tcp_send_all(fd, &says, sizeof says, spw_now_ns() + 1000000000u);
        (void)spw__tcp_recv_all(stranger, &fd, sizeof fd, spw_now_ns() + 50000000000u);
        _exit(0);
    }
    assert_int_equal(spw__tcp_link_create(&t.base, &link, says.id, peers, 1, &err), SPW_OK);
    st = spw__tcp_link_join(link, spw_now_ns() + 15000000000u, &err);
    spw__tcp_link_close(link);
    close(t.listen_fd);
    kill(other, SIGKILL);
    (void)waitpid(other, NULL, 0);
    assert_string_equal(err.message, "");
    assert_int_equal(st, SPW_OK);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing),       cmocka_unit_test(test_environment),
        cmocka_unit_test(test_nested),        cmocka_unit_test(test_quiet),
        cmocka_unit_test(test_strangers),     cmocka_unit_test(test_signal_while_connecting),
        cmocka_unit_test(test_elsewhere),     cmocka_unit_test(test_ended_joining),
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_started_again),
        cmocka_unit_test(test_late_greeting), cmocka_unit_test(test_unreachable),
        cmocka_unit_test(test_other_version), cmocka_unit_test(test_no_name),
    };
    return cmocka_run_group_tests_name("comm join", tests, NULL, NULL);
}
