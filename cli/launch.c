/*
 * Local ranks without a launcher: spillway train -n N, or bench comm, starts itself N times with the variables that torchrun sets, passes
 * signals on, and ends with the first failure's exit code.
 */
#include "cli.h"
#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GRACE_S = 90 }; /* ranks find out by themselves what happened; only then are they killed */

#define STARTED_BY "SPW_STARTED_BY" /* in a rank of launch(): the process that called it */

static pid_t children[CLI_RANKS_MAX];
static uint32_t child_count;

static void
pass_on(int number)
{
    for (uint32_t i = 0; i < child_count; i++) {
        if (children[i] > 0)
            (void)kill(children[i], number);
    }
}

/*
 * A port that is free, and stays so for nobody but rank 0, which shares it as it lets its address be used again: the socket is bound, never
 * listens, and lives as long as this process. 0: there is none.
 */
static uint32_t
hold_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
        bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && getsockname(fd, (struct sockaddr *)&at, &bytes) == 0)
        return ntohs(at.sin_port);
    close(fd);
    return 0;
}

static void
set_number(const char *name, uint32_t value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    (void)setenv(name, text, 1);
}

/* On a machine of several nodes, one of them, or some: memory is then taken where the threads are. */
static void
take_share(uint32_t rank, uint32_t count)
{
    spw_topology t;
    spw_id_set nodes;
    cpu_set_t cpus;
    spw_topology_read(&t, "", NULL);
    if (spw_topology_nodes(&t, &nodes) < 2)
        return; /* the scheduler knows better which CPU is idle */
    spw_topology_share(&t, rank, count);
    CPU_ZERO(&cpus);
    for (uint32_t i = 0; i < t.cpu_count; i++)
        CPU_SET(t.cpus[i].cpu, &cpus);
    (void)sched_setaffinity(0, sizeof cpus, &cpus); /* a hint: where the system refuses, all CPUs serve */
}

/* This process is a rank of a launch(). */
static bool
is_launched(void)
{
    const char *parent = getenv(STARTED_BY);
    return parent != NULL && strtoul(parent, NULL, 10) == (unsigned long)getppid();
}

static void
become_rank(uint32_t rank, uint32_t count, uint32_t port, pid_t parent, const sigset_t *signals, char **argv)
{
    (void)sigprocmask(SIG_SETMASK, signals, NULL); /* one that has come meanwhile ends it */
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(EXIT_FAILED);
    take_share(rank, count);
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    set_number("WORLD_SIZE", count);
    set_number("LOCAL_WORLD_SIZE", count);
    set_number("MASTER_PORT", port);
    (void)setenv("MASTER_ADDR", "127.0.0.1", 1);
    (void)unsetenv(
        "TORCHELASTIC_USE_AGENT_STORE"); /* of a torchrun around this: nobody listens at our port before rank 0 */
    set_number(STARTED_BY, (uint32_t)parent);
    execv("/proc/self/exe", argv);
    fprintf(stderr, "spillway: cannot start rank %u: %s\n", rank, strerror(errno));
    _exit(EXIT_FAILED);
}

/* Waits for all; the first that fails, or else one that paused, decides the exit code, and the others get time to say what they saw. */
static int
wait_for_all(void)
{
    uint32_t left = child_count;
    uint64_t kill_at = UINT64_MAX;
    int rc = EXIT_DONE;
    while (left > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, kill_at == UINT64_MAX ? 0 : WNOHANG);
        if (pid == 0) {
            if (spw_now_ns() >= kill_at) {
                fprintf(stderr, "spillway: %u rank%s did not end by %s: killed\n", left, left > 1 ? "s" : "",
                        left > 1 ? "themselves" : "itself");
                pass_on(SIGKILL);
                kill_at = UINT64_MAX;
            } else {
                spw_sleep_ns(20000000);
            }
            continue;
        }
        if (pid < 0) {
            if (errno == EINTR)
                continue;
            break;
        }
        for (uint32_t i = 0; i < child_count; i++) {
            if (children[i] != pid)
                continue;
            children[i] = 0;
            left--;
            if (WIFSIGNALED(status))
                fprintf(stderr, "spillway: rank %u was ended by signal %d (%s)\n", i, WTERMSIG(status),
                        strsignal(WTERMSIG(status)));
            if (status != 0 && (rc == EXIT_DONE || rc == EXIT_PAUSED)) { /* a failure says more than a pause */
                rc = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILED;
                if (rc != EXIT_PAUSED)
                    kill_at = spw_now_ns() + (uint64_t)GRACE_S * 1000000000;
            }
        }
    }
    return rc;
}

/* When all ranks are there: none has inherited a handler that would keep it alive, and what has come meanwhile reaches all of them. */
static void
pass_on_signals(void)
{
    struct sigaction action = {.sa_handler = pass_on}, old;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    if (sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN) /* nohup */
        sigaction(SIGHUP, &action, NULL);
}

static int
launch(uint32_t count, char **argv)
{
    uint32_t port = hold_port();
    pid_t self = getpid();
    sigset_t all, before;
    if (port == 0) {
        fprintf(stderr, "spillway: no free port on 127.0.0.1: %s\n", strerror(errno));
        return EXIT_FAILED;
    }
    sigfillset(&all);
    (void)sigprocmask(SIG_SETMASK, &all, &before);
    for (uint32_t i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid == 0)
            become_rank(i, count, port, self, &before, argv);
        if (pid < 0) {
            fprintf(stderr, "spillway: cannot start rank %u: %s\n", i, strerror(errno));
            pass_on(SIGKILL);
            (void)wait_for_all();
            return EXIT_FAILED;
        }
        children[child_count++] = pid;
    }
    pass_on_signals();
    (void)sigprocmask(SIG_SETMASK, &before, NULL);
    return wait_for_all();
}

int
cli_start_ranks(const char *command, uint64_t count, char **argv)
{
    const char *of_mpi = getenv("OMPI_COMM_WORLD_SIZE");
    if (count == 0 || is_launched())
        return -1;
    if (getenv("RANK") != NULL && getenv("WORLD_SIZE") != NULL)
        return cli_usage(command,
                         "-n %llu starts ranks, but RANK is set: this is rank %s of the %s that a launcher started; "
                         "leave out -n, or unset RANK and WORLD_SIZE",
                         (unsigned long long)count, getenv("RANK"), getenv("WORLD_SIZE"));
    if (of_mpi != NULL && strcmp(of_mpi, "1") != 0)
        return cli_usage(command,
                         "-n %llu starts ranks, but mpirun started this process, one of %s: leave out -n, or mpirun",
                         (unsigned long long)count, of_mpi);
    return launch((uint32_t)count, argv);
}

uint64_t
cli_rank_count(const char *command, int argc, char **argv, int *i)
{
    const char *value = cli_value(command, argc, argv, i);
    uint64_t count;
    if (value == NULL)
        return 0;
    if (cli_number(value, &count) && count > 0 && count <= CLI_RANKS_MAX)
        return count;
    (void)cli_usage(command, "-n takes 1 to %d ranks, not %s", CLI_RANKS_MAX, value);
    return 0;
}
