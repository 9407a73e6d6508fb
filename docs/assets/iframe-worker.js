// A browser starts no worker for a page that is read from a folder (file:). The search of this site is one: there it runs
// in a frame of the page instead. Nothing is fetched from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.onload = () => {
        if (this.frame) return;
        this.frame = frame.contentWindow;
        this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = this.frame.document.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = () => {
          const waiting = this.waiting;
          this.waiting = null;
          waiting.forEach((data) => this.postMessage(data));
        };
        this.frame.document.head.append(script);
      };
      document.body.append(frame);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {}
  };
}
