"use strict";
// Values for people, as internal/human has them: both are tested against internal/human/testdata/examples.json.
// Durations are in milliseconds.
const human = (() => {
  const group = (digits) => digits.replace(/\B(?=(\d{3})+$)/g, ",");
  const count = (n) => (n < 0 ? "-" : "") + group(String(Math.abs(n)));
  const money = (usd) => {
    if (!Number.isFinite(usd)) return "–";
    if (usd < 0) return "-" + money(-usd);
    if (usd === 0) return "$0.00";
    if (usd < 0.00005) return "<$0.0001";
    if (usd < 0.00995) return "$" + usd.toFixed(4);
    const [whole, cents] = usd.toFixed(2).split(".");
    return "$" + group(whole) + "." + cents;
  };
  const tenths = (n) => n >= 100 || n % 10 === 0 ? count(Math.floor(n / 10)) : Math.floor(n / 10) + "." + n % 10;
  const bytes = (n) => {
    if (n < 1e3) return n + " B";
    if (n < 1e6) return tenths(Math.floor(n / 1e2)) + " kB";
    if (n < 1e9) return tenths(Math.floor(n / 1e5)) + " MB";
    return tenths(Math.floor(n / 1e8)) + " GB";
  };
  const percent = (share) => {
    if (Number.isNaN(share)) return "–";
    if (share > 0 && share < 0.01) return "<1 %";
    if (share > 0.99 && share < 1) return ">99 %";
    return (share * 100).toFixed(0) + " %";
  };
  const second = 1000, minute = 60 * second, hour = 60 * minute, day = 24 * hour;
  const pair = (ms, big, bigName, small, smallName) => {
    const rest = Math.floor(ms % big / small);
    return count(Math.floor(ms / big)) + " " + bigName + (rest ? " " + rest + " " + smallName : "");
  };
  const duration = (ms) => {
    if (ms <= 0) return "0 ms";
    if (ms < 1) return "<1 ms";
    if (ms < second) return Math.floor(ms) + " ms";
    if (ms < minute) return tenths(Math.floor(ms / 100)) + " s";
    if (ms < hour) return pair(ms, minute, "min", second, "s");
    if (ms < day) return pair(ms, hour, "h", minute, "min");
    return pair(ms, day, "d", hour, "h");
  };
  const clock = (ms) => ms < second ? "0 s" : duration(ms - ms % second);
  const until = (ms) => ms < second ? "due" : "in " + clock(ms);
  const left = (ms) => ms <= 0 ? "over" : clock(ms) + " left";
  const ago = (ms) => {
    if (ms <= -second) return until(-ms);
    if (ms < second) return "just now";
    const [n, unit] = ms < minute ? [ms / second, "s"] : ms < hour ? [ms / minute, "min"] : ms < day ? [ms / hour, "h"] : [ms / day, "d"];
    return count(Math.floor(n)) + " " + unit + " ago";
  };
  return { money, count, bytes, percent, duration, clock, ago, until, left };
})();
