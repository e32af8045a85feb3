/* A clock that the test turns, preloaded under an unmodified cron daemon.
 *
 * The daemon reads the time, sleeps until the next minute, forks a child for each line that is due, and the child
 * forks again and executes the shell. Here a sleep ends at once and moves the clock by its length, a fork in the
 * daemon waits for the child's end (so that what is fired within a minute keeps its order and its second), and the
 * execution of the shell is written down, as "second<TAB>command", instead of done.
 *
 * LAB_BEGIN and LAB_END are epoch seconds: the clock starts at the first, the daemon ends at the second. LAB_LOG is the
 * file. LAB_SUSPENDS is "at:seconds,...": in the sleep that passes `at` the machine is suspended that long.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_SUSPENDS = 32 };

static long long now, end;
static const char *log_path;
static pid_t daemon_pid;
static struct { long long at, seconds; } suspends[MOST_SUSPENDS];
static int suspend_count, suspends_done;

__attribute__((constructor)) static void set_up(void)
{
    const char *begin = getenv("LAB_BEGIN"), *until = getenv("LAB_END"), *list = getenv("LAB_SUSPENDS");

    if (begin == NULL || until == NULL)
        return;
    now = atoll(begin);
    end = atoll(until);
    log_path = strdup(getenv("LAB_LOG"));
    daemon_pid = getpid();
    while (list != NULL && *list != '\0' && suspend_count < MOST_SUSPENDS) {
        char *rest;
        suspends[suspend_count].at = strtoll(list, &rest, 10);
        suspends[suspend_count++].seconds = strtoll(rest + 1, &rest, 10);
        list = *rest == ',' ? rest + 1 : rest;
    }
}

static void write_down(const char *command)
{
    char line[256];
    int length = snprintf(line, sizeof line, "%lld\t%s\n", now, command);
    int file = open(log_path, O_WRONLY | O_APPEND | O_CREAT, 0600);

    if (file < 0 || write(file, line, length) != length)
        _exit(99);
    close(file);
}

static void pass(long long seconds)
{
    now += seconds;
    while (suspends_done < suspend_count && suspends[suspends_done].at <= now)
        now += suspends[suspends_done++].seconds;
    if (now >= end && getpid() == daemon_pid) {
        write_down("end");
        _exit(0);
    }
}

time_t time(time_t *result)
{
    if (result != NULL)
        *result = now;
    return now;
}

int gettimeofday(struct timeval *restrict result, void *restrict zone)
{
    (void)zone;
    result->tv_sec = now;
    result->tv_usec = 0;
    return 0;
}

int clock_gettime(clockid_t clock, struct timespec *result)
{
    (void)clock;
    result->tv_sec = now;
    result->tv_nsec = 0;
    return 0;
}

unsigned int sleep(unsigned int seconds)
{
    pass(seconds);
    return 0;
}

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    (void)left;
    pass(wanted->tv_sec);
    return 0;
}

pid_t fork(void)
{
    pid_t (*real)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "fork");
    pid_t child = real();
    siginfo_t ended;

    if (child > 0 && getpid() == daemon_pid)
        /* Seen, but left for the daemon to collect. */
        while (waitid(P_PID, child, &ended, WEXITED | WNOWAIT) < 0 && errno == EINTR)
            ;
    return child;
}

/* The daemon starts a line as execle(shell, shell, "-c", command, NULL, environment). */
int execle(const char *path, const char *name, ...)
{
    const char *flag, *command;
    va_list rest;

    (void)path;
    (void)name;
    va_start(rest, name);
    flag = va_arg(rest, const char *);
    command = flag != NULL && strcmp(flag, "-c") == 0 ? va_arg(rest, const char *) : "unexpected";
    va_end(rest);
    write_down(command);
    _exit(0);
}

/* No accounts, no sessions, no log: they would ask the machine, and with its own clock. */
void syslog(int priority, const char *format, ...) { (void)priority; (void)format; }
void __syslog_chk(int priority, int flag, const char *format, ...) { (void)priority; (void)flag; (void)format; }
int pam_start(const char *service, const char *user, const void *talk, void **handle)
{
    static int opaque;
    (void)service; (void)user; (void)talk;
    *handle = &opaque;
    return 0;
}
int pam_set_item(void *handle, int item, const void *value) { (void)handle; (void)item; (void)value; return 0; }
int pam_acct_mgmt(void *handle, int flags) { (void)handle; (void)flags; return 0; }
int pam_setcred(void *handle, int flags) { (void)handle; (void)flags; return 0; }
int pam_open_session(void *handle, int flags) { (void)handle; (void)flags; return 0; }
int pam_close_session(void *handle, int flags) { (void)handle; (void)flags; return 0; }
int pam_end(void *handle, int status) { (void)handle; (void)status; return 0; }
char **pam_getenvlist(void *handle) { (void)handle; return calloc(1, sizeof(char *)); }
